// image_positions: four rows of a table, weighted. Grid: patches x slices of the columns. A thread
// computes eight neighbouring columns.
#include "linear/vec8.cuh"

constexpr int THREADS = 128;

KERNEL void __launch_bounds__(THREADS)
image_positions(const u16* __restrict__ table, const i32* taps, const float* weights, u16* y,
                int columns) {
    const int chunks = columns / 8, c = blockIdx.y * THREADS + threadIdx.x;
    let_next_start();
    wait_for_previous();
    if (c >= chunks) return;
    const int4 rows = reinterpret_cast<const int4*>(taps)[blockIdx.x];
    const float4 by = reinterpret_cast<const float4*>(weights)[blockIdx.x];
    const int at[4] = {rows.x, rows.y, rows.z, rows.w};
    const float factor[4] = {by.x, by.y, by.z, by.w};
    float sum[8] = {};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float v[8];
        unpack8(v, reinterpret_cast<const uint4*>(table)[static_cast<i64>(at[i]) * chunks + c]);
#pragma unroll
        for (int j = 0; j < 8; j++) sum[j] = fma_rn(factor[i], v[j], sum[j]);
    }
    reinterpret_cast<uint4*>(y)[static_cast<i64>(blockIdx.x) * chunks + c] = pack8(sum);
}
