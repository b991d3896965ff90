// draft_conv in one launch. Grid: rows (MOST_ROWS if sums of squares are written) x slices of the
// columns. A thread computes eight neighbouring columns of a row. A norm needs the whole rows: each
// block adds up their squares itself, from the L2 cache, rather than wait for another launch.
//
// Compile-time: TAPS; NORM, 0 none, 1 or 2 with a weight of bf16 or float32; BASE_FLOAT, `base` is
// float32; NEXT, in which form the rows are left for the next product, as in linear/epilogue.cuh.
#include "linear/vec8.cuh"
#include "linear/activation_slabs.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int MOST_ROWS = 32, SQUARES_COLUMNS = 32;  // of the sums of squares

// 1 / rms of row t and of the rows before it, as far as they exist. Called by the whole block.
DEVICE void row_scales(float (&scales)[TAPS], const uint4* x, int t, int chunks, float eps) {
    __shared__ float parts[TAPS][WARPS];
    float sums[TAPS] = {};
#pragma unroll
    for (int tap = 0; tap < TAPS; ++tap) {
        if (t < tap) break;
        const uint4* const row = x + static_cast<i64>(t - tap) * chunks;
        for (int c = threadIdx.x; c < chunks; c += THREADS) sums[tap] += squares8(row[c]);
    }
#pragma unroll
    for (int tap = 0; tap < TAPS; ++tap) {
#pragma unroll
        for (int mask = 16; mask; mask /= 2) sums[tap] += shuffle_xor(sums[tap], mask);
        if (threadIdx.x % 32 == 0) parts[tap][threadIdx.x / 32] = sums[tap];
    }
    sync_block();
#pragma unroll
    for (int tap = 0; tap < TAPS; ++tap) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += parts[tap][w];
        scales[tap] = rsqrtf(sum / (8 * chunks) + eps);
    }
}

// x, residual, y [rows, hidden]; dynamic [rows, 2 * TAPS * groups]; base [2, TAPS, hidden].
KERNEL void __launch_bounds__(THREADS)
draft_conv(const u16* x, const void* __restrict__ norm_weight, const u16* dynamic,
           const void* __restrict__ base, const u16* residual, u16* y, u16* slabs, float* squares,
           const void* __restrict__ next_weight, int rows, int hidden, int group, int side,
           float eps, float offset, float next_offset) {
    const int t = blockIdx.x, chunks = hidden / 8, c = blockIdx.y * THREADS + threadIdx.x;
    const int column = 8 * c;
    const bool inside = c < chunks, there = inside && t < rows;
    float kernel[TAPS][8], weight[8], next[8];
    if (there) {
#pragma unroll
        for (int tap = 0; tap < TAPS; ++tap)
            norm_weights8<BASE_FLOAT>(kernel[tap], base, (side * TAPS + tap) * hidden + column, 0.0f);
        if (NORM) norm_weights8<NORM == 2>(weight, norm_weight, column, offset);
        if (NEXT == 1 || NEXT == 2) norm_weights8<NEXT == 2>(next, next_weight, column, next_offset);
    }
    let_next_start();
    wait_for_previous();
    const uint4* const from = reinterpret_cast<const uint4*>(x);
    float scales[TAPS];
    if (NORM && t < rows) row_scales(scales, from, t, chunks, eps);
    uint4 made = make_uint4(0, 0, 0, 0);
    if (there) {
        const int groups = hidden / group;
        const u16* const own = dynamic + (static_cast<i64>(t) * 2 + side) * TAPS * groups;
        const i64 at = static_cast<i64>(t) * chunks + c;
        float sum[8] = {};
        if (residual) unpack8(sum, reinterpret_cast<const uint4*>(residual)[at]);
#pragma unroll
        for (int tap = 0; tap < TAPS; ++tap) {
            if (t < tap) break;
            const float shared = bf16_float(own[tap * groups + column / group]);
            float z[8];
            unpack8(z, from[at - tap * chunks]);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                if (NORM) z[i] = z[i] * scales[tap] * weight[i];
                sum[i] = fma_rn(kernel[tap][i] + shared, z[i], sum[i]);
            }
        }
        made = pack8(sum);
        reinterpret_cast<uint4*>(y)[at] = made;
    }
    if (squares) {
        float sum = squares8(made);
        sum += shuffle_xor(sum, 1);
        sum += shuffle_xor(sum, 2);
        if (inside && threadIdx.x % 4 == 0) squares[column / SQUARES_COLUMNS * MOST_ROWS + t] = sum;
    }
    if (!NEXT || !there) return;
    if (NEXT != 3) {
        float v[8];
        unpack8(v, made);
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] *= next[i];
        made = pack8(v);
    }
    *reinterpret_cast<uint4*>(slabs + slab_offset(rows, t, column)) = made;
}
