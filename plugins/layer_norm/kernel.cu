// layer_norm: one block per row, which stays in registers. A thread processes eight neighbouring
// columns at a time. The variance is a second sum, of squares of what is left after the mean.
//
// Compile-time: WEIGHT_FLOAT, `weight` is float32 instead of bf16.
#include "linear/vec8.cuh"

constexpr int THREADS = 128, WARPS = THREADS / 32;
constexpr int UNITS = 4;  // most units of eight columns that a thread keeps

// x, y [rows, columns]; weight, bias [columns]; columns a multiple of 8.
KERNEL void __launch_bounds__(THREADS)
layer_norm(const u16* x, const void* __restrict__ weight, const float* __restrict__ bias, u16* y,
           int columns, float eps) {
    __shared__ float means[WARPS], squares[WARPS];
    const int chunks = columns / 8;
    const i64 row = static_cast<i64>(blockIdx.x) * chunks;
    let_next_start();
    wait_for_previous();
    float v[UNITS][8];
    float sum = 0.0f;
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const int c = u * THREADS + threadIdx.x;
        if (c >= chunks) break;
        unpack8(v[u], reinterpret_cast<const uint4*>(x)[row + c]);
#pragma unroll
        for (int i = 0; i < 8; i++) sum += v[u][i];
    }
    const float mean = block_sum<WARPS>(sum, means) / columns;
    sum = 0.0f;
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        if (u * THREADS + static_cast<int>(threadIdx.x) >= chunks) break;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            v[u][i] -= mean;
            sum = fma_rn(v[u][i], v[u][i], sum);
        }
    }
    const float scale = rsqrtf(block_sum<WARPS>(sum, squares) / columns + eps);
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const int c = u * THREADS + threadIdx.x;
        if (c >= chunks) break;
        float w[8], add[8];
        norm_weights8<WEIGHT_FLOAT>(w, weight, 8 * c, 0.0f);
        norm_weights8<true>(add, bias, 8 * c, 0.0f);
#pragma unroll
        for (int i = 0; i < 8; i++) v[u][i] = fma_rn(v[u][i] * scale, w[i], add[i]);
        reinterpret_cast<uint4*>(y)[row + c] = pack8(v[u]);
    }
}
