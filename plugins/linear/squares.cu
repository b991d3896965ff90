// Sums of squares of rows that no linear made: squares[columns / 256][32] of bf16 x[rows][columns].
// Block -> 256 columns; warp -> rows warp, warp + 8, ...; lane -> 8 columns.
#include "cuda/device.cuh"

KERNEL void __launch_bounds__(256) squares(const u16* x, float* squares, int rows, int columns) {
    wait_for_previous();
    let_next_start();
    const int lane = threadIdx.x % 32, column = blockIdx.x * 256 + lane * 8;
#pragma unroll
    for (int row = threadIdx.x / 32; row < 32; row += 8) {
        uint4 eight = make_uint4(0, 0, 0, 0);
        if (row < rows && column < columns) {
            const u16* at = x + static_cast<i64>(row) * columns + column;
            eight = load_shared_result(reinterpret_cast<const uint4*>(at));
        }
        const u32 pairs[4] = {eight.x, eight.y, eight.z, eight.w};
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sum = fma_rn(bf16x2_low(pairs[i]), bf16x2_low(pairs[i]), sum);
            sum = fma_rn(bf16x2_high(pairs[i]), bf16x2_high(pairs[i]), sum);
        }
#pragma unroll
        for (int mask = 16; mask; mask /= 2) sum += shuffle_xor(sum, mask);
        if (lane == 0) squares[blockIdx.x * 32 + row] = sum;
    }
}
