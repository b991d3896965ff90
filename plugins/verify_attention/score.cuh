// A scorer: all query rows against its quarter of each tile's positions, and the running softmax.
#pragma once

#include "verify_attention/tile.cuh"

typedef float Scores[GROUP][NS][4];

// A row's exponents are taken from `base`, which follows the maximum in steps of at least this: 256
// is the largest weight, and rows whose maximum creeps leave the mixture alone.
constexpr float SLACK = 8.0f;

// What a scorer carries from tile to tile. Sums of weights stay split over the lanes and quarters.
struct Running {
    float base[GROUP][2];
    float sum[GROUP][2];
};

DEVICE void reset(Running& r) {
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
        r.base[i][0] = r.base[i][1] = nothing();
        r.sum[i][0] = r.sum[i][1] = 0.0f;
    }
}

// Stage i of this warp's ring of halves of keys.
DEVICE u8* key_stage(u8* memory, int i, const Lane& at) {
    return memory + KEYS + (at.quarter * KEY_STAGES + i) * KEY_STAGE;
}

// One more half of this warp's keys, or nothing where there are no more.
DEVICE void ask_keys(Ahead& ahead, const u8* stage, const Work& work, const Lane& at) {
    constexpr int CHUNKS = KEY_PITCH / 16, STEP = 32 / CHUNKS;
    if (ahead.walk.valid(work.pieces)) {
        const saddr to = shared_address(stage);
        const int row = at.lane / CHUNKS, chunk = at.lane % CHUNKS;
        const int position = ahead.walk.first + at.quarter * QUARTER + row;
        const u8* from = work.keys + static_cast<i64>(position) * CACHE_BYTES +
                         ahead.part * KEY_PITCH + chunk * 16;
        const int limit = work.limit;
#pragma unroll
        for (int i = 0; i < QUARTER / STEP; i++)
            copy_async16(to + swizzled(row + i * STEP, chunk, KEY_PITCH),
                         from + i * STEP * CACHE_BYTES, position + i * STEP < limit);
        if (ahead.part) ahead.walk.step(work.pieces);
        ahead.part ^= 1;
    }
    copy_async_commit();
}

// What this warp asked for first is in, the call's own rows included. `first`: its first position.
DEVICE void keys_are_in(u8* stage, const u8* memory, const Work& work, int first, int half,
                        const Lane& at) {
    constexpr int CHUNKS = KEY_PITCH / 16;
    copy_async_wait<KEY_STAGES - 1>();
    sync_warp();
    const int begin = max(first, work.limit);
    const int end = min(first + QUARTER, work.limit + work.rows);
    if (begin >= end) return;
    for (int i = at.lane; i < (end - begin) * CHUNKS; i += 32) {
        const int position = begin + i / CHUNKS, chunk = i % CHUNKS;
        const u8* row = fresh_row(memory, work, 0, position) + half * KEY_PITCH;
        *reinterpret_cast<uint4*>(stage + swizzled(position - first, chunk, KEY_PITCH)) =
            reinterpret_cast<const uint4*>(row)[chunk];
    }
    sync_warp();
}

// s += queries . keys over one half of the columns.
DEVICE void score(Scores& s, saddr memory, saddr keys, int half, const Lane& at) {
    // FP8: matrix j of a load is n8 tile j, 16 columns. bf16: n8 tile j / 2, 8 columns each.
    const int position = FP8 ? at.lane : ((at.lane >> 4) << 3) + (at.lane & 7);
    const u32 key = keys + position * KEY_PITCH;
    const u32 twist = (position & 7) << 4, key_half = FP8 ? 0 : ((at.lane >> 3) & 1) << 4;
    const int row = at.lane & 15;
    const u32 query = memory + QUERIES + row * QUERY_PITCH + half * (QUERY_PITCH / 2);
    const u32 query_twist = (row & 7) << 4, query_half = (at.lane >> 4) << 4;
#pragma unroll
    for (int step = 0; step < WIDTH / 32; step++) {
        u32 raw[4], b0[NS], b1[NS];
        load_matrix4(raw, key + (((step * (FP8 ? 16 : 32)) + key_half) ^ twist));
#pragma unroll
        for (int n = 0; n < NS; n++) {
            b0[n] = FP8 ? e4m3x2_f16x2(static_cast<u16>(raw[n])) : raw[(2 * n) & 3];
            b1[n] = FP8 ? e4m3x2_f16x2(static_cast<u16>(raw[n] >> 16)) : raw[(2 * n + 1) & 3];
        }
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            u32 a[4];
            load_matrix4(a, query + i * TOKENS * QUERY_PITCH +
                                ((step * 32 + query_half) ^ query_twist));
#pragma unroll
            for (int n = 0; n < NS; n++) multiply(s[i][n], a, b0[n], b1[n]);
        }
    }
}

// Nothing after the row's own position. `own` is that of token 0, `first` that of this warp's keys.
DEVICE void mask(Scores& s, int own, int first, const Lane& at) {
    // Last visible column of this lane's fragments, for rows g and g + 8.
    const int last = own + at.g - (first + 2 * at.t);
#pragma unroll
    for (int i = 0; i < GROUP; i++)
#pragma unroll
        for (int n = 0; n < NS; n++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (8 * n + (j & 1) > last + 8 * (j >> 1)) s[i][n][j] = nothing();
}

// The row maxima of this quarter for the other three, as logits of base 2.
DEVICE void share_tops(const Scores& s, float* tops, float scale, const Lane& at) {
#pragma unroll
    for (int i = 0; i < GROUP; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float top = fmaxf(s[i][0][2 * h], s[i][0][2 * h + 1]);
#pragma unroll
            for (int n = 1; n < NS; n++)
                top = fmaxf(top, fmaxf(s[i][n][2 * h], s[i][n][2 * h + 1]));
            top = fmaxf(top, shuffle_xor(top, 1));
            top = fmaxf(top, shuffle_xor(top, 2));
            if (at.t == 0) tops[(i * TOKENS + 8 * h + at.g) * 4 + at.quarter] = mul_rn(top, scale);
        }
}

// What was mixed so far is to be multiplied by `keep`: 1 for rows whose base stays.
DEVICE void move_bases(Running& r, const float* tops, float* keeps, const Lane& at) {
#pragma unroll
    for (int i = 0; i < GROUP; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = i * TOKENS + 8 * h + at.g;
            const float4 top = reinterpret_cast<const float4*>(tops)[row];
            const float best = fmaxf(fmaxf(top.x, top.y), fmaxf(top.z, top.w));
            float keep = 1.0f;
            if (best > add_rn(r.base[i][h], SLACK)) {
                keep = exp2_approx(r.base[i][h] - best);
                r.base[i][h] = best;
            }
            r.sum[i][h] = mul_rn(r.sum[i][h], keep);
            if (at.quarter == 0 && at.t == 0) keeps[row] = keep;
        }
}

// exp2(logit - base) into shared memory.
DEVICE void weigh(Running& r, const Scores& s, u8* weights, float scale, const Lane& at) {
#pragma unroll
    for (int i = 0; i < GROUP; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = i * TOKENS + 8 * h + at.g;
            // Nothing seen yet: any finite number leaves every weight at zero.
            const float base = r.base[i][h] == nothing() ? 0.0f : r.base[i][h];
            float sum = r.sum[i][h];
#pragma unroll
            for (int n = 0; n < NS; n++) {
                const float x = exp2_approx(fma_rn(s[i][n][2 * h], scale, -base));
                const float y = exp2_approx(fma_rn(s[i][n][2 * h + 1], scale, -base));
                sum = add_rn(sum, add_rn(x, y));
                u8* to = weights + swizzled(row, at.quarter * NS + n, WEIGHT_PITCH);
                reinterpret_cast<u32*>(to)[at.t] = FP8 ? pack_f16x2(x, y) : pack_bf16x2(x, y);
            }
            r.sum[i][h] = sum;
        }
}

// The bases and this quarter's sums, at the end of a piece.
DEVICE void share_sums(const Running& r, float* sums, float* bases, const Lane& at) {
#pragma unroll
    for (int i = 0; i < GROUP; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float x = r.sum[i][h];
            x = add_rn(x, shuffle_xor(x, 1));
            x = add_rn(x, shuffle_xor(x, 2));
            const int row = i * TOKENS + 8 * h + at.g;
            if (at.t == 0) sums[row * 4 + at.quarter] = x;
            if (at.t == 0 && at.quarter == 0) bases[row] = r.base[i][h];
        }
}

// Every tile of the block's pieces. `own` is the position of token 0 of the query rows.
DEVICE void score_all(u8* memory, Ahead& ahead, float scale, int own, const Lane& at) {
    const saddr base = shared_address(memory);
    const Work& work = work_of(memory);
    Running r;
    reset(r);
    int n = 0, next = 0;
    for (Walk<POSITIONS> walk(work.pieces); walk.valid(work.pieces); walk.step(work.pieces)) {
        const int mine = walk.first + at.quarter * QUARTER, side = n & 1;
        Scores s = {};
#pragma unroll 1
        for (int half = 0; half < 2; half++) {
            u8* stage = key_stage(memory, next, at);
            keys_are_in(stage, memory, work, mine, half, at);
            score(s, base, shared_address(stage), half, at);
            sync_warp();
            ask_keys(ahead, stage, work, at);
            next = next + 1 < KEY_STAGES ? next + 1 : 0;
        }
        if (mine + QUARTER - 1 > own) mask(s, own, mine, at);
        float* tops = reinterpret_cast<float*>(memory + TOPS) + side * 4 * ROWS;
        share_tops(s, tops, scale, at);
        sync_some(1, TEAM);
        if (n >= 2) barrier_wait(empty(memory, n), ((n >> 1) - 1) & 1);
        move_bases(r, tops, reinterpret_cast<float*>(memory + KEEPS) + side * ROWS, at);
        weigh(r, s, memory + WEIGHTS + side * WEIGHT_BYTES, scale, at);
        if (walk.ends()) {
            share_sums(r, reinterpret_cast<float*>(memory + SUMS) + side * 4 * ROWS,
                       reinterpret_cast<float*>(memory + BASES) + side * ROWS, at);
            reset(r);
        }
        barrier_arrive(full(memory, n));
        n++;
    }
}
