// rms_norm: one block per row. A thread processes eight neighbouring columns at a time, and reads
// them a second time, from a cache, once the sum of squares is known: a row may have any length.
//
// Compile-time: WEIGHT_FLOAT, `weight` is float32 instead of bf16.
#include "linear/vec8.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;

// x, y [rows, columns]; weight [columns]; columns a multiple of 8.
KERNEL void __launch_bounds__(THREADS)
rms_norm(const u16* x, const void* __restrict__ weight, u16* y, int columns, float eps,
         float offset) {
    __shared__ float parts[WARPS];
    const int chunks = columns / 8;
    const i64 row = static_cast<i64>(blockIdx.x) * chunks;
    const uint4* const from = reinterpret_cast<const uint4*>(x) + row;
    let_next_start();
    wait_for_previous();
    float sum = 0.0f;
    for (int c = threadIdx.x; c < chunks; c += THREADS) sum += squares8(from[c]);
    const float scale = rsqrtf(block_sum<WARPS>(sum, parts) / columns + eps);
    for (int c = threadIdx.x; c < chunks; c += THREADS) {
        float v[8], w[8];
        unpack8(v, from[c]);
        norm_weights8<WEIGHT_FLOAT>(w, weight, 8 * c, offset);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = v[i] * scale * w[i];
        reinterpret_cast<uint4*>(y)[row + c] = pack8(v);
    }
}
