// The contract's prologue: prepares a product's input rows in float32, rounded to bf16 once. One
// block per row, or several if no sum covers the whole row. A thread processes eight neighbouring
// columns at a time, so the order of a row's sums never changes. Parts that a call does not need
// are left out at compile time: with all of them, the launch takes half a microsecond longer.
//
// Compile-time: WEIGHT_FLOAT, the norm's weight is float32 instead of bf16; SLABS, rows are written
// in slabs; LONG, these have more than 2^31 elements; GATE; NORM, 0 for none, 1 for a norm over the
// row, else the columns of a head (one of HEADS in prologue_launch.py).
#include "linear/vec8.cuh"
#include "linear/row_norm.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
enum { NO_GATE, SIGMOID, SILU };

DEVICE float gated(float x, float gate) {
    if (GATE == NO_GATE) return x;
    const float s = sigmoid(gate);
    return GATE == SIGMOID ? x * s : x * (gate * s);
}

// x, gate, y [rows, width], width a multiple of 8; norm_weight [width] or [columns of a head].
// SLABS: y is in slabs, the last one padded with zeros.
KERNEL void __launch_bounds__(THREADS)
linear_rows(const u16* x, const void* __restrict__ norm_weight, const u16* gate, u16* y, int width,
            float eps, float offset) {
    __shared__ float parts[WARPS];
    constexpr bool by_row = NORM == 1, by_head = NORM > 1;
    float w[8] = {};
    // Loaded from memory, hence before the next kernel may start, whose weights keep memory busy.
    if (by_head) norm_weights8<WEIGHT_FLOAT>(w, norm_weight, threadIdx.x * 8 & (NORM - 1), offset);
    let_next_start();
    wait_for_previous();
    const i64 row = static_cast<i64>(blockIdx.x) * width;
    const uint4* in = reinterpret_cast<const uint4*>(x + row);
    const uint4* gates = reinterpret_cast<const uint4*>(gate + row);
    uint4* out = reinterpret_cast<uint4*>(SLABS ? y : y + row);
    constexpr int lanes = NORM / 8;  // lanes that share one head's sum
    const int chunks = width / 8;
    const int end = SLABS ? (chunks + 7) / 8 * 8 : chunks;
    float scale = 1.0f;
    if (by_row) {
        float sum = 0.0f;
        for (int c = threadIdx.x; c < chunks; c += THREADS) sum += squares8(in[c]);
        scale = rsqrtf(block_sum<WARPS>(sum, parts) / width + eps);
    }
    // The bound is the same for all lanes of a warp: shuffles need every lane.
    for (int first = blockIdx.y * THREADS; first < end; first += gridDim.y * THREADS) {
        const int c = first + threadIdx.x;
        const bool there = c < chunks;
        const uint4 packed = there ? in[c] : make_uint4(0, 0, 0, 0);
        const uint4 gate8 = there && GATE ? gates[c] : make_uint4(0, 0, 0, 0);
        if (by_head) {
            float sum = squares8(packed);
#pragma unroll
            for (int mask = lanes / 2; mask; mask /= 2) sum += shuffle_xor(sum, mask);
            scale = rsqrtf(sum * (1.0f / NORM) + eps);
        }
        if (c >= end) continue;
        uint4& to = out[!SLABS ? c
                        : LONG ? slab_offset<i64>(gridDim.x, blockIdx.x, 8 * c) / 8
                               : slab_offset(gridDim.x, blockIdx.x, 8 * c) / 8];
        if (!there) {
            to = make_uint4(0, 0, 0, 0);
            continue;
        }
        float v[8], g[8];
        unpack8(v, packed);
        unpack8(g, gate8);
        if (by_row) norm_weights8<WEIGHT_FLOAT>(w, norm_weight, 8 * c, offset);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            v[i] = gated(NORM ? v[i] * scale * w[i] : v[i], g[i]);
        }
        to = pack8(v);
    }
}
