// A warp's work on each tile, with a running softmax: its half of the heads times the keys of a
// quarter of the tile's positions, then the weights times a quarter of the values' columns.
#pragma once

#include "verify_attention/kv_load.cuh"
#include "verify_attention/split_kv_merge.cuh"

typedef float Scores[MT][NS][4];

// A row's weights are exp2(logit - base). `base` is raised to the row's maximum only when that
// exceeds it by more than this. Weights are then at most 2^8 = 256, and a maximum that grows slowly
// does not rescale the mixture (Running::o) at every tile.
constexpr float SLACK = 8.0f;

DEVICE void reset(Running& r) {
#pragma unroll
    for (int i = 0; i < MT; i++) {
#pragma unroll
        for (int n = 0; n < NO; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) r.o[i][n][j] = 0.0f;
        r.base[i][0] = r.base[i][1] = nothing();
        r.sum[i][0] = r.sum[i][1] = 0.0f;
    }
}

// This lane's addresses in rows of 16-bit elements, for its half of the heads; a row consists of
// lines of 128 bytes. Tokens of a head lie PITCH bytes apart, heads TILE bytes.
template <int PITCH, int TILE> struct Operand {
    saddr row;

    DEVICE Operand(saddr begin, const Lane& at) {
        const int token = at.lane & 15;
        row = begin + at.heads * MT * TILE + token * PITCH + (((token & 7) ^ (at.lane >> 4)) << 4);
    }
    // Loads the a fragments of columns 16 step .. 16 step + 15 of every m16 tile.
    DEVICE void load(u32 (&a)[MT][4], int step) const {
        const saddr first = (row ^ step % 4 * 32) + step / 4 * 128;
#pragma unroll
        for (int i = 0; i < MT; i++) load_matrix4(a[i], first + i * TILE);
    }
};

// Decodes the b fragments of 16 columns of this warp's keys.
DEVICE void key_fragments(u32 (&b0)[NS], u32 (&b1)[NS], const u32 (&raw)[4]) {
#pragma unroll
    for (int n = 0; n < NS; n++) {
        if (FP8) {
            e4m3x4_f16x4(raw[n], b0[n], b1[n]);
        } else {
            b0[n] = raw[(2 * n) & 3];
            b1[n] = raw[(2 * n + 1) & 3];
        }
    }
}

template <int N>
DEVICE void multiply(float (&d)[MT][N][4], const u32 (&a)[MT][4], const u32 (&b0)[N],
                     const u32 (&b1)[N]) {
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int n = 0; n < N; n++) {
            if (FP8) mma_f16(d[i][n], a[i], b0[n], b1[n]);
            else mma_bf16(d[i][n], a[i], b0[n], b1[n]);
        }
}

DEVICE void fill(Scores& s, float x) {
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int n = 0; n < NS; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) s[i][n][j] = x;
}

// s = queries . keys, for this warp's heads and quarter of the positions. Operands are loaded one
// step ahead.
DEVICE void score(Scores& s, u8* memory, saddr keys, const Lane& at) {
    // FP8: matrix j of a load is n8 tile j with 16 columns. bf16: n8 tile j / 2 with 8 columns.
    const int position = FP8 ? at.lane : ((at.lane >> 4) << 3) + (at.lane & 7);
    const saddr key = keys + position * CACHE_BYTES +
                      (((position & 7) ^ (FP8 ? 0 : (at.lane >> 3) & 1)) << 4);
    const Operand<QUERY_PITCH, QUERY_BYTES> queries(shared_address(memory + QUERIES), at);
    u32 raw[2][4], a[2][MT][4];
    load_matrix4(raw[0], key);
    queries.load(a[0], 0);
    fill(s, 0.0f);
#pragma unroll
    for (int step = 0; step < WIDTH / 16; step++) {
        const int now = step & 1;
        if (step + 1 < WIDTH / 16) {
            const int next = (step + 1) * (FP8 ? 16 : 32);
            load_matrix4(raw[now ^ 1], (key ^ next % 128) + next / 128 * 128);
            queries.load(a[now ^ 1], step + 1);
        }
        u32 b0[NS], b1[NS];
        key_fragments(b0, b1, raw[now]);
        multiply(s, a[now], b0, b1);
    }
}

// Masks positions after the row's own. `own`: position of token 0; `first`: of this warp's first
// key.
DEVICE void mask(Scores& s, int own, int first, const Lane& at) {
    // Last visible column of this lane's fragments, for rows g and g + 8.
    const int last = own + at.g - (first + 2 * at.t);
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int n = 0; n < NS; n++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (8 * n + (j & 1) > last + 8 * (j >> 1)) s[i][n][j] = nothing();
}

// The largest of this lane's scores of a row.
DEVICE float top_of(const Scores& s, int i, int h) {
    float top = fmaxf(s[i][0][2 * h], s[i][0][2 * h + 1]);
#pragma unroll
    for (int n = 1; n < NS; n++) top = fmaxf(top, fmaxf(s[i][n][2 * h], s[i][n][2 * h + 1]));
    return top;
}

// Shares the row maxima of this warp's quarter with the other three, as logits to base 2.
DEVICE void share_tops(const Scores& s, u8* memory, float scale, const Lane& at) {
    float top[MT][2];
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) top[i][h] = top_of(s, i, h);
#pragma unroll
    for (int far = 1; far <= 2; far++)
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                top[i][h] = fmaxf(top[i][h], shuffle_xor(top[i][h], far));
    if (at.t == 0) {
        float* to = reinterpret_cast<float*>(memory + TOPS) + at.quarter;
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) to[4 * row_of(i, h, at)] = mul_rn(top[i][h], scale);
    }
}

// Updates the bases for this tile, and rescales earlier sums and mixtures of rows whose base moved.
DEVICE void move_bases(Running& r, const u8* memory, const Lane& at) {
    float keep[MT][2];
    bool moved = false;
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float4 top = reinterpret_cast<const float4*>(memory + TOPS)[row_of(i, h, at)];
            const float best = fmaxf(fmaxf(top.x, top.y), fmaxf(top.z, top.w));
            const bool before = r.base[i][h] != nothing();
            const bool moves = best > add_rn(r.base[i][h], SLACK);
            keep[i][h] = moves ? exp2_approx(r.base[i][h] - best) : 1.0f;
            r.base[i][h] = moves ? best : r.base[i][h];
            r.sum[i][h] = mul_rn(r.sum[i][h], keep[i][h]);
            // On a row's first tile, sums and mixture are still zero and need no rescaling.
            moved = moved || (moves && before);
        }
    // Rows that did not move are multiplied by one: their bits do not depend on other rows.
    if (ballot(moved) == 0) return;
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int n = 0; n < NO; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) r.o[i][n][j] = mul_rn(r.o[i][n][j], keep[i][j >> 1]);
}

// Writes the weights exp2(logit - base) to shared memory; `sums` is r.sum plus these weights.
DEVICE void weigh(float (&sums)[MT][2], const Running& r, const Scores& s, u8* memory, float scale,
                  const Lane& at) {
    // Stores four matrices of eight rows x eight positions at a time; this lane provides the
    // address of one row of one matrix.
    const int matrix = at.lane >> 3, row = at.heads * MT * TOKENS + matrix / NS * 8 + (at.lane & 7);
    const saddr to = shared_address(memory + WEIGHTS) +
                     swizzled(row, at.quarter * NS + matrix % NS, WEIGHT_PITCH);
#pragma unroll
    for (int i = 0; i < MT; i++) {
        u32 pairs[2 * NS];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            // If nothing was visible yet, any finite base gives weights of zero.
            const float base = r.base[i][h] == nothing() ? 0.0f : r.base[i][h];
            float sum = r.sum[i][h];
#pragma unroll
            for (int n = 0; n < NS; n++) {
                const float x = exp2_approx(fma_rn(s[i][n][2 * h], scale, -base));
                const float y = exp2_approx(fma_rn(s[i][n][2 * h + 1], scale, -base));
                sum = add_rn(sum, add_rn(x, y));
                pairs[h * NS + n] = FP8 ? pack_f16x2(x, y) : pack_bf16x2(x, y);
            }
            sums[i][h] = sum;
        }
#pragma unroll
        for (int m = 0; m < 2 * NS; m += 4) {
            const u32 four[4] = {pairs[m], pairs[m + 1], pairs[m + 2], pairs[m + 3]};
            store_matrix4(to + (i * TOKENS + m / NS * 8) * WEIGHT_PITCH, four);
        }
    }
}

// This lane's addresses in the first 16 positions of this warp's columns. The swizzle repeats every
// 8 rows.
constexpr int LOADS = FP8 ? 2 : 4;
DEVICE void value_places(saddr (&place)[LOADS], saddr part, const Lane& at) {
#pragma unroll
    for (int l = 0; l < LOADS; l++)
        place[l] = part + value_at(at.lane & 15, 2 * l + (at.lane >> 4));
}
// Loads 16 positions of these columns as stored; FP8 bytes are transposed in pairs of columns.
DEVICE void load_values(u32 (&raw)[LOADS][4], const saddr (&place)[LOADS], int step) {
#pragma unroll
    for (int l = 0; l < LOADS; l++)
        load_matrix4_transposed(raw[l], place[l] + step * 16 * VALUE_PITCH);
}

// Decodes their b fragments, two n8 tiles for every 16 columns. FP8: tile 2c holds the even
// columns, tile 2c + 1 the odd ones.
DEVICE void fragments(u32 (&b0)[NO], u32 (&b1)[NO], const u32 (&raw)[LOADS][4]) {
#pragma unroll
    for (int l = 0; l < LOADS; l++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const u32 low = raw[l][2 * c], high = raw[l][2 * c + 1];
            if (FP8) {
                const int n = (4 * l + 2 * c) & 7;
                e4m3x4_f16x4(select_bytes(low, 0, 0x3120), b0[n], b0[n + 1]);
                e4m3x4_f16x4(select_bytes(high, 0, 0x3120), b1[n], b1[n + 1]);
            } else {
                b0[(2 * l + c) & 7] = low;
                b1[(2 * l + c) & 7] = high;
            }
        }
}

// Adds a tile to the mixture: weights times values. Operands are loaded one step ahead. Without
// DENSE, only two steps are unrolled: with less code the whole verify is a little faster, although
// this kernel by itself is not.
template <bool DENSE> DEVICE void mix(Running& r, u8* memory, saddr part, const Lane& at) {
    const Operand<WEIGHT_PITCH, TOKENS * WEIGHT_PITCH> weights(shared_address(memory + WEIGHTS), at);
    u32 raw[2][LOADS][4], a[2][MT][4];
    saddr place[LOADS];
    value_places(place, part, at);
    load_values(raw[0], place, 0);
    weights.load(a[0], 0);
#pragma unroll (DENSE ? POSITIONS / 16 : 2)
    for (int step = 0; step < POSITIONS / 16; step++) {
        const int now = step & 1;
        if (step + 1 < POSITIONS / 16) {
            load_values(raw[now ^ 1], place, step + 1);
            weights.load(a[now ^ 1], step + 1);
        }
        u32 b0[NO], b1[NO];
        fragments(b0, b1, raw[now]);
        multiply(r.o, a[now], b0, b1);
    }
}

// The same for a tile of which only the first positions are seen: the weights of others are zero.
DEVICE void mix_some(Running& r, u8* memory, saddr part, int seen, const Lane& at) {
    const Operand<WEIGHT_PITCH, TOKENS * WEIGHT_PITCH> weights(shared_address(memory + WEIGHTS), at);
    saddr place[LOADS];
    value_places(place, part, at);
#pragma unroll 1
    for (int step = 0; 16 * step < seen; step++) {
        u32 raw[LOADS][4], a[MT][4], b0[NO], b1[NO];
        load_values(raw, place, step);
        weights.load(a, step);
        fragments(b0, b1, raw);
        multiply(r.o, a, b0, b1);
    }
}

// Adds each row's sums of weights over all lanes, then over all quarters.
DEVICE void add_up(Running& r, u8* memory, const Lane& at) {
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float x = r.sum[i][h];
            x = add_rn(x, shuffle_xor(x, 1));
            x = add_rn(x, shuffle_xor(x, 2));
            if (at.t == 0)
                reinterpret_cast<float*>(memory + SUMS)[4 * row_of(i, h, at) + at.quarter] = x;
        }
    sync_half(at.half);
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float4 x = reinterpret_cast<const float4*>(memory + SUMS)[row_of(i, h, at)];
            r.sum[i][h] = add_rn(add_rn(add_rn(x.x, x.y), x.z), x.w);
        }
}

// Whether any of this lane's scores would move its row's base.
DEVICE bool rises(const Running& r, const Scores& s, const float (&sums)[MT][2], float scale) {
    // Such a score has a weight of about 256 or more, and a sum is at least as large as its terms,
    // so smaller sums rule it out. The row has a base already: a row that sees a later tile of a
    // piece has seen all of the piece's first tile.
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < MT; i++) most = fmaxf(most, fmaxf(sums[i][0], sums[i][1]));
    if (most < 255.0f) return false;
    bool any = false;
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            any |= mul_rn(top_of(s, i, h), scale) > add_rn(r.base[i][h], SLACK);
    return any;
}

// Turns the scores of tile n into weights in shared memory. `first`: this warp's first position;
// `opens`: the tile is the first of its piece. In later tiles bases seldom move, so the weights are
// computed first; the warps find out at their barrier whether a base must move, and then repeat it.
DEVICE void soften(Running& r, Scores& s, u8* memory, float scale, int own, int first, int n,
                   bool opens, const Lane& at) {
    if (first + QUARTER - 1 > own) mask(s, own, first, at);
    if (n > 0) barrier_wait(weights_read(memory, at), (n - 1) & 1);
    float sum[MT][2];
#pragma unroll 1
    for (bool moves = opens;; moves = true) {
        if (moves) {
            share_tops(s, memory, scale, at);
            sync_half(at.half);
            move_bases(r, memory, at);
        }
        weigh(sum, r, s, memory, scale, at);
        if (moves) {
            sync_half(at.half);
            break;
        }
        if (!sync_half_any(at.half, rises(r, s, sum, scale))) break;
    }
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) r.sum[i][h] = sum[i][h];
}

// `seen`, here and below: how many of the tile's positions some row sees; may be more than it has.
DEVICE void score_tile(Scores& s, u8* memory, int n, int seen, const Lane& at) {
    barrier_wait(Keys::full(memory, n, at), (n >> 1) & 1);
    if (at.quarter * QUARTER < seen) score(s, memory, shared_address(Keys::part(memory, n, at)), at);
    else fill(s, nothing());
}

template <bool DENSE>
DEVICE void mix_tile(Running& r, u8* memory, int n, int seen, const Lane& at) {
    barrier_wait(Values::full(memory, n, at), (n >> 1) & 1);
    const saddr part = shared_address(Values::part(memory, n, at));
    if (!DENSE && seen <= POSITIONS / 2) mix_some(r, memory, part, seen, at);
    else mix<DENSE>(r, memory, part, at);
    barrier_arrive(weights_read(memory, at));
}

// A value that depends on the last loads of a step, for `received`: each of these results depends
// on every load of its last step.
DEVICE u32 last_of(const Scores& s, const Running& r) {
    u32 x = float_bits(s[0][0][0]);
#pragma unroll
    for (int n = 0; n < NO; n += 2) x ^= float_bits(r.o[0][n][0]);
    return x;
}

// Processes every tile of the block's pieces and stores each piece's result with `sink(slot)`.
// `own`: position of token 0 of the query rows. `DENSE`: a block has many tiles.
template <bool DENSE, class Where>
DEVICE void attend(const Past& past, KvPrefetcher& prefetcher, float scale, int own, const Where& sink,
                   const Lane& at) {
    u8* const memory = past.memory;
    KvTileIterator<POSITIONS> tiles(past.pieces);
    Running r;
    Scores s;
    reset(r);
    if (at.half) prefetcher.begin(past, tiles.first, at);
    for (int n = 0;; n++) {
        // Delays the second warp of a pair, so that one multiplies while the other computes
        // exponentials. This pays off if a piece has several tiles; with many it is not needed.
        if (!DENSE && n == 0 && at.half && !at.alone && past.pieces.after > POSITIONS)
            barrier_wait(turn_over(memory, 0, at), 0);
        const bool ends = n > 0 && tiles.ends();
        const int slot = ends ? past.pieces.span(tiles.item).slot : 0;
        if (n > 0) {
            mix_tile<DENSE>(r, memory, n - 1, past.pieces.end - tiles.first, at);
            tiles.step(past.pieces);
        }
        const bool more = tiles.valid(past.pieces);
        if (more) {
            score_tile(s, memory, n, past.pieces.end - tiles.first, at);
            if (at.half) prefetcher.provide(past, n, tiles.first, at);
        }
        received(last_of(s, r));
        if (!at.half) barrier_arrive(turn_over(memory, n, at));
        else if (more) prefetcher.refill(past, n, at);
        if (ends) {
            add_up(r, memory, at);
            sink(slot).store(r, at);
            reset(r);
        }
        if (!more) break;
        soften(r, s, memory, scale, own, tiles.first + at.quarter * QUARTER, n, n == 0 || ends, at);
    }
    copy_async_wait<0>();
}
