// One tile of the cache against the query rows of one block: scores, running softmax, mixture.
//
// Query rows are GROUP heads of 16 tokens, one m16 tile each. Eight warps: warp w holds half w / 4
// of the heads, and of each cache tile quarter w % 4 of the positions while it scores and quarter
// w % 4 of the columns while it mixes. Weights pass between the four warps of a half through shared
// memory. The second half starts a piece when the first has its scores, and neither waits for the
// other but for cache tiles: one fills the tensor cores while the other takes exponentials.
//
// An FP8 tile becomes f16 in registers, exactly; queries are bf16 numbers held as f16, also exactly
// (|q| < 65504 after a norm; what f16 flushes is below 2^-24). Cache and queries in bf16: bf16
// products.
#pragma once

#include "verify_attention/rows.cuh"

constexpr int TOKENS = 16;                      // of one block of query rows
constexpr int ROWS = GROUP * TOKENS;
constexpr int MT = GROUP / 2;                   // m16 tiles of a warp
constexpr int POSITIONS = FP8 ? 128 : 64;       // of a tile: 32 KiB of keys, as much of values
constexpr int NS = POSITIONS / 32;              // n8 tiles of a warp's scores
constexpr int NO = 8;                           // n8 tiles of a warp's mixture
constexpr int THREADS = 256;

constexpr int QUERY_PITCH = 2 * WIDTH;
constexpr int WEIGHT_PITCH = 2 * POSITIONS;
constexpr int TILE = POSITIONS * CACHE_BYTES;
constexpr int STAGE = 2 * TILE;                 // keys, then values
constexpr int QUERIES = 0;
constexpr int WEIGHTS = QUERIES + ROWS * QUERY_PITCH;
constexpr int TILES = WEIGHTS + ROWS * WEIGHT_PITCH;
constexpr int TOPS = TILES + 2 * STAGE;         // float [4][ROWS]
constexpr int SUMS = TOPS + 16 * ROWS;          // float [4][ROWS]
constexpr int NEXT = SUMS + 16 * ROWS;          // int
constexpr int BARRIERS = NEXT + 16;             // u64 [5], see Pipe
constexpr int FRESH = BARRIERS + 48;            // rows of this call as the cache holds them

DEVICE float nothing() { return bits_float(0xff800000u); }  // the maximum of no numbers

// 16-byte chunks of a row are exchanged within groups of eight by the row's low bits, so that eight
// rows of one chunk lie in eight different bank groups.
DEVICE u32 swizzled(int row, int chunk, int pitch) {
    return static_cast<u32>(row * pitch + ((chunk ^ (row & 7)) << 4));
}

// The four warps of one half of the heads meet.
DEVICE void sync_half(int half) {
    if (half) sync_some(2, THREADS / 2);
    else sync_some(1, THREADS / 2);
}

struct Lane {
    int lane, half, quarter;
    int g, t;  // row and column pair of a fragment
};

DEVICE Lane this_lane() {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    return {lane, warp >> 2, warp & 3, lane >> 2, lane & 3};
}

// What a warp carries from tile to tile. Sums of weights stay split over the lanes and quarters.
struct Running {
    float o[MT][NO][4];
    float best[MT][2];
    float sum[MT][2];
};

DEVICE void reset(Running& r) {
#pragma unroll
    for (int i = 0; i < MT; i++) {
#pragma unroll
        for (int n = 0; n < NO; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) r.o[i][n][j] = 0.0f;
        r.best[i][0] = r.best[i][1] = nothing();
        r.sum[i][0] = r.sum[i][1] = 0.0f;
    }
}

DEVICE void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if (FP8) mma_f16(d, a, b0, b1);
    else mma_bf16(d, a, b0, b1);
}

// Positions first .. first + POSITIONS - 1 of one head, asynchronously; zeros from `limit` on.
DEVICE void load_tile(u8* stage, const u8* k, const u8* v, int first, int limit) {
    constexpr int CHUNKS = CACHE_BYTES / 16;
    const saddr to = shared_address(stage);
#pragma unroll
    for (int which = 0; which < 2; which++) {
        const u8* from = (which ? v : k) + static_cast<i64>(first) * CACHE_BYTES;
#pragma unroll
        for (int i = 0; i < TILE / 16 / THREADS; i++) {
            const int chunk = threadIdx.x + i * THREADS;
            const int row = chunk / CHUNKS, column = chunk % CHUNKS;
            copy_async16(to + which * TILE + swizzled(row, column, CACHE_BYTES), from + chunk * 16,
                         first + row < limit);
        }
    }
    copy_async_commit();
}

// A normalised, rotated query row into shared memory. For FP8 keys lane t's two pairs of each 16
// columns are 4t, 4t + 1 and 4t + 2, 4t + 3, as four neighbouring bytes of a key are read.
DEVICE void store_query(u8* queries, int row, const float (&x)[8], int lane) {
    u32 pair[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        pair[i] = pack_bf16x2(x[2 * i], x[2 * i + 1]);
        if (FP8) pair[i] = pack_f16x2(bf16x2_low(pair[i]), bf16x2_high(pair[i]));
    }
    if (FP8) {
        const int chunk = lane & ~1, offset = 8 * (lane & 1);
        *reinterpret_cast<uint2*>(queries + swizzled(row, chunk, QUERY_PITCH) + offset) =
            make_uint2(pair[0], pair[2]);
        *reinterpret_cast<uint2*>(queries + swizzled(row, chunk + 1, QUERY_PITCH) + offset) =
            make_uint2(pair[1], pair[3]);
    } else {
        *reinterpret_cast<uint4*>(queries + swizzled(row, lane, QUERY_PITCH)) =
            make_uint4(pair[0], pair[1], pair[2], pair[3]);
    }
}

// s = queries . keys, of this warp's heads and quarter of the positions.
DEVICE void score(float (&s)[MT][NS][4], saddr memory, saddr keys, const Lane& at) {
    // FP8: matrix j of a load is n8 tile j, 16 columns. bf16: n8 tile j / 2, 8 columns each.
    const int position = at.quarter * 8 * NS +
                         (FP8 ? at.lane : ((at.lane >> 4) << 3) + (at.lane & 7));
    const u32 key = keys + position * CACHE_BYTES;
    const u32 twist = (position & 7) << 4, key_half = FP8 ? 0 : ((at.lane >> 3) & 1) << 4;
    const int row = at.half * MT * TOKENS + (at.lane & 15);
    const u32 query = memory + QUERIES + row * QUERY_PITCH;
    const u32 query_twist = (row & 7) << 4, query_half = (at.lane >> 4) << 4;
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int n = 0; n < NS; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) s[i][n][j] = 0.0f;
#pragma unroll
    for (int step = 0; step < WIDTH / 16; step++) {
        u32 raw[4], b0[NS], b1[NS];
        load_matrix4(raw, key + (((step * (FP8 ? 16 : 32)) + key_half) ^ twist));
#pragma unroll
        for (int n = 0; n < NS; n++) {
            b0[n] = FP8 ? e4m3x2_f16x2(static_cast<u16>(raw[n])) : raw[(2 * n) & 3];
            b1[n] = FP8 ? e4m3x2_f16x2(static_cast<u16>(raw[n] >> 16)) : raw[(2 * n + 1) & 3];
        }
#pragma unroll
        for (int i = 0; i < MT; i++) {
            u32 a[4];
            load_matrix4(a, query + i * TOKENS * QUERY_PITCH +
                                ((step * 32 + query_half) ^ query_twist));
#pragma unroll
            for (int n = 0; n < NS; n++) multiply(s[i][n], a, b0[n], b1[n]);
        }
    }
}

// Scores to logits (base 2), masked after the row's own position; the row maxima of this quarter.
// `own` is the position of token 0 of the block's rows, `first` that of the tile.
DEVICE void mask(float (&s)[MT][NS][4], u8* memory, float scale, int own, int first,
                 const Lane& at) {
    float* tops = reinterpret_cast<float*>(memory + TOPS) + at.quarter * ROWS;
    // Last visible column of this lane's fragments, for rows g and g + 8.
    const int last = own + at.g - (first + at.quarter * 8 * NS + 2 * at.t);
#pragma unroll
    for (int i = 0; i < MT; i++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float top = nothing();
#pragma unroll
            for (int n = 0; n < NS; n++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    float& x = s[i][n][2 * h + j];
                    x = 8 * n + j <= last + 8 * h ? mul_rn(x, scale) : nothing();
                    top = fmaxf(top, x);
                }
            top = fmaxf(top, shuffle_xor(top, 1));
            top = fmaxf(top, shuffle_xor(top, 2));
            const int row = (at.half * MT + i) * TOKENS + 8 * h + at.g;
            if (at.t == 0) tops[row] = top;
        }
    }
}

// exp2(logit - running maximum) into shared memory; what was summed before follows the maximum.
DEVICE void weigh(Running& r, float (&s)[MT][NS][4], u8* memory, const Lane& at) {
    const float* tops = reinterpret_cast<const float*>(memory + TOPS);
#pragma unroll
    for (int i = 0; i < MT; i++) {
        float keep[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = (at.half * MT + i) * TOKENS + 8 * h + at.g;
            const float best =
                fmaxf(fmaxf(fmaxf(tops[row], tops[ROWS + row]),
                            fmaxf(tops[2 * ROWS + row], tops[3 * ROWS + row])),
                      r.best[i][h]);
            // Nothing seen yet: any finite number leaves every weight at zero.
            const float base = best == nothing() ? 0.0f : best;
            keep[h] = exp2_approx(r.best[i][h] - base);
            r.best[i][h] = best;
            float sum = mul_rn(r.sum[i][h], keep[h]);
#pragma unroll
            for (int n = 0; n < NS; n++) {
                const float x = exp2_approx(s[i][n][2 * h] - base);
                const float y = exp2_approx(s[i][n][2 * h + 1] - base);
                sum = add_rn(sum, add_rn(x, y));
                u8* to = memory + WEIGHTS + swizzled(row, at.quarter * NS + n, WEIGHT_PITCH);
                reinterpret_cast<u32*>(to)[at.t] = FP8 ? pack_f16x2(x, y) : pack_bf16x2(x, y);
            }
            r.sum[i][h] = sum;
        }
        // Times one changes nothing, so whether other rows moved does not show.
        if (ballot(keep[0] != 1.0f || keep[1] != 1.0f) == 0) continue;
#pragma unroll
        for (int n = 0; n < NO; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) r.o[i][n][j] = mul_rn(r.o[i][n][j], keep[j >> 1]);
    }
}

// The b fragments of 16 positions and columns 16c .. 16c + 15 of this warp's quarter, two n8 tiles.
// FP8 bytes travel in pairs of columns: tile 2c holds the even columns, 2c + 1 the odd ones.
DEVICE void values(u32 (&b0)[NO], u32 (&b1)[NO], saddr tile, int step, const Lane& at) {
    const int position = step * 16 + (at.lane & 15);
    const u32 row = tile + position * CACHE_BYTES;
    const u32 twist = (position & 7) << 4;
    constexpr int LOADS = FP8 ? 2 : 4;
#pragma unroll
    for (int l = 0; l < LOADS; l++) {
        const int chunk = at.quarter * 2 * LOADS + 2 * l + (at.lane >> 4);
        u32 raw[4];
        load_matrix4_transposed(raw, row + ((chunk << 4) ^ twist));
#pragma unroll
        for (int c = 0; c < 2; c++) {
            if (FP8) {
                const int n = 4 * l + 2 * c;
                const u32 low = select_bytes(raw[2 * c], 0, 0x3120);
                const u32 high = select_bytes(raw[2 * c + 1], 0, 0x3120);
                b0[n & 7] = e4m3x2_f16x2(static_cast<u16>(low));
                b1[n & 7] = e4m3x2_f16x2(static_cast<u16>(high));
                b0[(n + 1) & 7] = e4m3x2_f16x2(static_cast<u16>(low >> 16));
                b1[(n + 1) & 7] = e4m3x2_f16x2(static_cast<u16>(high >> 16));
            } else {
                b0[(2 * l + c) & 7] = raw[2 * c];
                b1[(2 * l + c) & 7] = raw[2 * c + 1];
            }
        }
    }
}

// Positions 16 FROM .. 16 TO - 1 of the tile into the mixture.
template <int FROM, int TO>
DEVICE void mix(Running& r, saddr memory, saddr tile, const Lane& at) {
    const int row = at.half * MT * TOKENS + (at.lane & 15);
    const u32 weight = memory + WEIGHTS + row * WEIGHT_PITCH;
    const u32 twist = (row & 7) << 4, half = (at.lane >> 4) << 4;
#pragma unroll
    for (int step = FROM; step < TO; step++) {
        u32 b0[NO], b1[NO];
        values(b0, b1, tile, step, at);
#pragma unroll
        for (int i = 0; i < MT; i++) {
            u32 a[4];
            load_matrix4(a, weight + i * TOKENS * WEIGHT_PITCH + ((step * 32 + half) ^ twist));
#pragma unroll
            for (int n = 0; n < NO; n++) multiply(r.o[i][n], a, b0[n], b1[n]);
        }
    }
}

// Cache tiles alternate between two stages; tile n of the block is in stage n & 1. Each warp
// arrives once: at FULL when what it asked for has come, at EMPTY when it has mixed, and the first
// half at ORDER when it has scored a piece's first tile.
struct Pipe {
    u8* memory;
    const u8* keys;
    const u8* values;
    int limit;  // positions from here on are zeros
    int tile;   // n
    int piece;  // pieces begun before this one

    DEVICE saddr full(int n) const { return barrier(n & 1); }
    DEVICE saddr empty(int n) const { return barrier(2 + (n & 1)); }
    DEVICE saddr order() const { return barrier(4); }
    DEVICE saddr barrier(int i) const { return shared_address(memory + BARRIERS) + 8 * i; }
    DEVICE u8* stage(int n) const { return memory + TILES + (n & 1) * STAGE; }
};

// By one thread; the block meets before any other use.
DEVICE void init(const Pipe& pipe) {
    for (int i = 0; i < 4; i++) barrier_init(pipe.barrier(i), THREADS);
    barrier_init(pipe.order(), THREADS / 2);
    barrier_init_done();
}

// This thread's copies of tile n are in, and all it wrote before is seen by who waits for the tile.
DEVICE void arrived(const Pipe& pipe, int n) {
    copy_async_wait<0>();
    barrier_arrive(pipe.full(n));
}

// The tile at position `first`, which is in; `more`: the next one follows it.
DEVICE void absorb(Running& r, Pipe& pipe, float scale, int own, int first, bool begins, bool more,
                   const Lane& at) {
    const saddr base = shared_address(pipe.memory);
    const saddr keys = shared_address(pipe.stage(pipe.tile));
    if (begins && at.half) barrier_wait(pipe.order(), pipe.piece & 1);
    float s[MT][NS][4];
    score(s, base, keys, at);
    if (begins && !at.half) barrier_arrive(pipe.order());
    if (more) {
        if (pipe.tile > 0) barrier_wait(pipe.empty(pipe.tile - 1), ((pipe.tile - 1) >> 1) & 1);
        load_tile(pipe.stage(pipe.tile + 1), pipe.keys, pipe.values, first + POSITIONS, pipe.limit);
    }
    mask(s, pipe.memory, scale, own, first, at);
    sync_half(at.half);
    weigh(r, s, pipe.memory, at);
    sync_half(at.half);
    mix<0, POSITIONS / 32>(r, base, keys + TILE, at);
    if (more) arrived(pipe, pipe.tile + 1);
    mix<POSITIONS / 32, POSITIONS / 16>(r, base, keys + TILE, at);
    barrier_arrive(pipe.empty(pipe.tile));
    pipe.tile++;
}

// The sum of each row's weights over all lanes and quarters, in that order.
DEVICE void add_up(Running& r, u8* memory, const Lane& at) {
    float* sums = reinterpret_cast<float*>(memory + SUMS);
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float x = r.sum[i][h];
            x = add_rn(x, shuffle_xor(x, 1));
            x = add_rn(x, shuffle_xor(x, 2));
            const int row = (at.half * MT + i) * TOKENS + 8 * h + at.g;
            if (at.t == 0) sums[at.quarter * ROWS + row] = x;
        }
    sync_half(at.half);
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = (at.half * MT + i) * TOKENS + 8 * h + at.g;
            r.sum[i][h] = add_rn(add_rn(add_rn(sums[row], sums[ROWS + row]), sums[2 * ROWS + row]),
                                 sums[3 * ROWS + row]);
        }
}

template <bool F16> DEVICE u32 pack(float x, float y) {
    return F16 ? pack_f16x2(x, y) : pack_bf16x2(x, y);
}

// Mixture / sum * scale of the first `tokens` tokens; elements of 16 bits at
// to + token * token_stride + head of the group * head_stride.
template <bool F16>
DEVICE void store_rows(const Running& r, u16* to, i64 token_stride, i64 head_stride, float scale,
                       int tokens, const Lane& at) {
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int token = 8 * h + at.g;
            if (token >= tokens) continue;
            const float by = r.sum[i][h] > 0.0f ? scale / r.sum[i][h] : r.sum[i][h];
            u16* row = to + token * token_stride + (at.half * MT + i) * head_stride +
                       at.quarter * (WIDTH / 4);
#pragma unroll
            for (int c = 0; c < NO / 2; c++) {
                const float x0 = r.o[i][2 * c][2 * h] * by, x1 = r.o[i][2 * c][2 * h + 1] * by;
                const float y0 = r.o[i][2 * c + 1][2 * h] * by;
                const float y1 = r.o[i][2 * c + 1][2 * h + 1] * by;
                if (FP8) {
                    *reinterpret_cast<uint2*>(row + 16 * c + 4 * at.t) =
                        make_uint2(pack<F16>(x0, y0), pack<F16>(x1, y1));
                } else {
                    *reinterpret_cast<u32*>(row + 16 * c + 2 * at.t) = pack<F16>(x0, x1);
                    *reinterpret_cast<u32*>(row + 16 * c + 8 + 2 * at.t) = pack<F16>(y0, y1);
                }
            }
        }
}
