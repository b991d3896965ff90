// The rows of a linear on their way to shared memory: what comes before the product, rounded to
// bf16. A chunk is 256 of K of every row, staged by row tiles of 16; thread -> 8 columns (lane) of
// rows warp and warp + 8 of the tile.
//
// Compile-time: ROW_TILES; NORM 0 none, 1 over the row, 2 over each head; NORM_F32 the norm weight's
// type; GATE 0 none, 1 sigmoid, 2 silu.
#pragma once
#include "cuda/device.cuh"

constexpr int ROWS = 16 * ROW_TILES;
constexpr int CHUNK = 256;
constexpr int CHUNK_ROW = 2 * CHUNK;            // bytes
constexpr int CHUNK_BYTES = ROWS * CHUNK_ROW;
constexpr int PIECES = 2;                       // of a thread in a row tile, 16 bytes each
constexpr int MOST_ROWS = 32;

struct Rows {
    const u16* x;
    const void* norm_weight;
    const u16* gate;
    int rows, k, head_dim;
    float eps, offset;
};

// 1 / rms of the rows that this thread stages.
typedef float RowScales[ROW_TILES][PIECES];

// One thread's part of a row tile, between the loads and the stores.
struct Pieces {
    uint4 x[PIECES];
#if GATE
    uint4 gate[PIECES];
#endif
#if NORM
    uint4 weight[NORM_F32 ? 2 : 1];
#endif
    bool inside;
};

DEVICE uint4 load_rows16(const u16* p) {
    return load_shared_result(reinterpret_cast<const uint4*>(p));
}

DEVICE int staged_row(int tile, int piece) {
    return 16 * tile + 8 * piece + static_cast<int>(threadIdx.x / 32);
}

// Requests columns first..end of a row tile; the rest is zero.
DEVICE void fetch(Pieces& to, const Rows& from, int tile, int first, int end) {
    const int column = first + threadIdx.x % 32 * 8;
    to.inside = column < min(end, from.k);
#if NORM
    const int at = NORM == 2 ? column & (from.head_dim - 1) : column;
    to.weight[0] = make_uint4(0, 0, 0, 0);
    if (NORM_F32) to.weight[NORM_F32] = make_uint4(0, 0, 0, 0);
    if (to.inside) {
        const uint4* weight = static_cast<const uint4*>(from.norm_weight) + (at >> (3 - NORM_F32));
        to.weight[0] = weight[0];
        if (NORM_F32) to.weight[NORM_F32] = weight[1];
    }
#endif
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        const int row = staged_row(tile, i);
        const bool valid = to.inside && row < from.rows;
        const i64 at_row = static_cast<i64>(row) * from.k + column;
        to.x[i] = valid ? load_rows16(from.x + at_row) : make_uint4(0, 0, 0, 0);
#if GATE
        to.gate[i] = valid ? load_rows16(from.gate + at_row) : make_uint4(0, 0, 0, 0);
#endif
    }
}

DEVICE float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

#if NORM
// offset + weight of column pair i of 4.
DEVICE float2 norm_pair(const Pieces& from, int i, float offset) {
    const u32 bits[8] = {from.weight[0].x, from.weight[0].y, from.weight[0].z, from.weight[0].w,
                         from.weight[NORM_F32].x, from.weight[NORM_F32].y,
                         from.weight[NORM_F32].z, from.weight[NORM_F32].w};
    if (NORM_F32) {
        return make_float2(offset + bits_float(bits[2 * i]), offset + bits_float(bits[2 * i + 1]));
    }
    return make_float2(offset + bf16x2_low(bits[i]), offset + bf16x2_high(bits[i]));
}
#endif

#if NORM == 2
// 1 / rms of the head that 8 columns are in; lanes of one head add up alike.
DEVICE float head_scale(const u32 (&x)[4], const Rows& rows) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sum = fma_rn(bf16x2_low(x[i]), bf16x2_low(x[i]), sum);
        sum = fma_rn(bf16x2_high(x[i]), bf16x2_high(x[i]), sum);
    }
#pragma unroll
    for (int lanes = 1; lanes < 16; lanes *= 2) {
        const float other = shuffle_xor(sum, lanes);
        if (8 * lanes < rows.head_dim) sum += other;
    }
    return rsqrtf(sum / static_cast<float>(rows.head_dim) + rows.eps);
}
#endif

DEVICE u32 prologue(u32 x, u32 gate, float scale, float2 weight) {
    float low = bf16x2_low(x), high = bf16x2_high(x);
#if NORM
    low *= scale * weight.x;
    high *= scale * weight.y;
#endif
#if GATE
    const float g = bf16x2_low(gate), h = bf16x2_high(gate);
    low *= (GATE == 2 ? g : 1.0f) * sigmoid(g);
    high *= (GATE == 2 ? h : 1.0f) * sigmoid(h);
#endif
    return pack_bf16x2(low, high);
}

DEVICE uint4 finished(const Pieces& from, int i, const Rows& rows, float scale) {
    const u32 x[4] = {from.x[i].x, from.x[i].y, from.x[i].z, from.x[i].w};
    u32 y[4];
#if NORM == 2
    scale = head_scale(x, rows);
#endif
#pragma unroll
    for (int j = 0; j < 4; j++) {
        u32 gate = 0;
        float2 weight = make_float2(1.0f, 1.0f);
#if GATE
        gate = j == 0 ? from.gate[i].x : j == 1 ? from.gate[i].y
             : j == 2 ? from.gate[i].z : from.gate[i].w;
#endif
#if NORM
        weight = norm_pair(from, j, rows.offset);
#endif
        y[j] = prologue(x[j], gate, scale, weight);
    }
    return from.inside ? make_uint4(y[0], y[1], y[2], y[3]) : make_uint4(0, 0, 0, 0);
}

// Into a chunk in shared memory. 16-byte columns are xor-ed with the row, so that load_matrix4
// meets no bank twice.
DEVICE void store(u8* chunk, const Pieces& from, const Rows& rows, int tile,
                  const RowScales& scales) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        const int row = staged_row(tile, i);
        u8* to = chunk + row * CHUNK_ROW + ((lane ^ (row & 7)) << 4);
#if NORM || GATE
        *reinterpret_cast<uint4*>(to) = finished(from, i, rows, scales[tile][i]);
#else
        *reinterpret_cast<uint4*>(to) = from.x[i];
#endif
    }
}

// From the sums of squares [chunks, 32]; a warp's lanes add up one row at a time.
DEVICE void read_scales(RowScales& scales, const Rows& rows, const float* squares) {
#pragma unroll
    for (int i = 0; i < ROW_TILES * PIECES; i++) {
        float& scale = scales[i / PIECES][i % PIECES];
        scale = 1.0f;
#if NORM == 1
        const int row = staged_row(i / PIECES, i % PIECES);
        float sum = 0.0f;
        for (int c = threadIdx.x % 32; c * CHUNK < rows.k; c += 32) {
            sum += load_shared_result(squares + c * MOST_ROWS + row);
        }
#pragma unroll
        for (int mask = 16; mask; mask /= 2) sum += shuffle_xor(sum, mask);
        scale = rsqrtf(sum / static_cast<float>(rows.k) + rows.eps);
#endif
    }
}
