// A mixer: all query rows' weights times its quarter of the columns of the values.
#pragma once

#include "verify_attention/tile.cuh"

typedef float Mixture[GROUP][NO][4];

// Stage i of this warp's ring of quarters of values.
DEVICE u8* value_stage(u8* memory, int i, const Lane& at) {
    return memory + VALUES + (at.quarter * VALUE_STAGES + i) * VALUE_STAGE;
}

// One more quarter of a tile's positions, or nothing where there are no more.
DEVICE void ask_values(Ahead& ahead, const u8* stage, const Work& work, const Lane& at) {
    constexpr int CHUNKS = VALUE_PITCH / 16, STEP = 32 / CHUNKS;
    if (ahead.walk.valid(work.pieces)) {
        const saddr to = shared_address(stage);
        const int row = at.lane / CHUNKS, chunk = at.lane % CHUNKS;
        const int position = ahead.walk.first + ahead.part * QUARTER + row;
        const u8* from = work.values + static_cast<i64>(position) * CACHE_BYTES +
                         at.quarter * VALUE_PITCH + chunk * 16;
        const int limit = work.limit;
#pragma unroll
        for (int i = 0; i < QUARTER / STEP; i++)
            copy_async16(to + value_at(row + i * STEP, chunk), from + i * STEP * CACHE_BYTES,
                         position + i * STEP < limit);
        if (ahead.part == 3) ahead.walk.step(work.pieces);
        ahead.part = (ahead.part + 1) & 3;
    }
    copy_async_commit();
}

// What this warp asked for first is in, the call's own rows included. `first`: its first position.
DEVICE void values_are_in(u8* stage, const u8* memory, const Work& work, int first,
                          const Lane& at) {
    constexpr int CHUNKS = VALUE_PITCH / 16;
    copy_async_wait<VALUE_STAGES - 1>();
    sync_warp();
    const int begin = max(first, work.limit);
    const int end = min(first + QUARTER, work.limit + work.rows);
    if (begin >= end) return;
#pragma unroll 1
    for (int i = at.lane; i < (end - begin) * CHUNKS; i += 32) {
        const int position = begin + i / CHUNKS, chunk = i % CHUNKS;
        const u8* row = fresh_row(memory, work, 1, position) + at.quarter * VALUE_PITCH;
        *reinterpret_cast<uint4*>(stage + value_at(position - first, chunk)) =
            reinterpret_cast<const uint4*>(row)[chunk];
    }
    sync_warp();
}

// The b fragments of 16 positions and this warp's columns, two n8 tiles each 16 columns.
// FP8 bytes travel in pairs of columns: tile 2c holds the even columns, 2c + 1 the odd ones.
DEVICE void fragments(u32 (&b0)[NO], u32 (&b1)[NO], saddr stage, int step, const Lane& at) {
    const int position = step * 16 + (at.lane & 15);
    constexpr int LOADS = FP8 ? 2 : 4;
#pragma unroll
    for (int l = 0; l < LOADS; l++) {
        u32 raw[4];
        load_matrix4_transposed(raw, stage + value_at(position, 2 * l + (at.lane >> 4)));
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

// One quarter of a tile's positions into the mixture.
DEVICE void mix(Mixture& o, saddr weights, saddr stage, int quarter, const Lane& at) {
    const int row = at.lane & 15;
    const u32 weight = weights + row * WEIGHT_PITCH;
    const u32 twist = (row & 7) << 4, half = (at.lane >> 4) << 4;
#pragma unroll
    for (int step = 0; step < QUARTER / 16; step++) {
        u32 b0[NO], b1[NO];
        fragments(b0, b1, stage, step, at);
        const u32 column = ((quarter * QUARTER + step * 16) * 2 + half) ^ twist;
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            u32 a[4];
            load_matrix4(a, weight + i * TOKENS * WEIGHT_PITCH + column);
#pragma unroll
            for (int n = 0; n < NO; n++) multiply(o[i][n], a, b0[n], b1[n]);
        }
    }
}

// What was mixed before follows the bases.
DEVICE void follow(Mixture& o, const float* keeps, const Lane& at) {
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
        const float keep[2] = {keeps[i * TOKENS + at.g], keeps[i * TOKENS + 8 + at.g]};
        // Times one changes nothing, so whether other rows moved does not show.
        if (ballot(keep[0] != 1.0f || keep[1] != 1.0f) == 0) continue;
#pragma unroll
        for (int n = 0; n < NO; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) o[i][n][j] = mul_rn(o[i][n][j], keep[j >> 1]);
    }
}

DEVICE float sum_of(const float4& x) { return add_rn(add_rn(add_rn(x.x, x.y), x.z), x.w); }

template <bool F16> DEVICE u32 pack(float x, float y) {
    return F16 ? pack_f16x2(x, y) : pack_bf16x2(x, y);
}

// Where a mixture goes: elements of 16 bits at to + token * token_stride + head of the group *
// head_stride, times scale / sum; with `stats` each row's base and sum.
struct Sink {
    u16* to;
    i64 token_stride, head_stride;
    float scale;
    int tokens;
    float2* stats;
};

template <bool F16>
DEVICE void store(const Mixture& o, const float4* sums, const float* bases, const Sink& sink,
                  const Lane& at) {
#pragma unroll
    for (int i = 0; i < GROUP; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int token = 8 * h + at.g, index = i * TOKENS + token;
            if (token >= sink.tokens) continue;
            const float sum = sum_of(sums[index]), by = sum > 0.0f ? sink.scale / sum : sum;
            if (sink.stats && at.quarter == 0 && at.t == 0)
                sink.stats[index] = make_float2(bases[index], sum);
            u16* row = sink.to + token * sink.token_stride + i * sink.head_stride +
                       at.quarter * (WIDTH / 4);
#pragma unroll
            for (int c = 0; c < NO / 2; c++) {
                const float x0 = o[i][2 * c][2 * h] * by, x1 = o[i][2 * c][2 * h + 1] * by;
                const float y0 = o[i][2 * c + 1][2 * h] * by, y1 = o[i][2 * c + 1][2 * h + 1] * by;
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

DEVICE void clear(Mixture& o) {
#pragma unroll
    for (int i = 0; i < GROUP; i++)
#pragma unroll
        for (int n = 0; n < NO; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) o[i][n][j] = 0.0f;
}

// Every tile of the block's pieces; piece after piece goes to where `sink(slot)` says.
template <bool F16, class Where>
DEVICE void mix_all(u8* memory, Ahead& ahead, const Where& sink, const Lane& at) {
    const saddr weights = shared_address(memory) + WEIGHTS;
    const Work& work = work_of(memory);
    Mixture o;
    clear(o);
    int n = 0, next = 0;
    for (Walk<POSITIONS> walk(work.pieces); walk.valid(work.pieces); walk.step(work.pieces)) {
        const int side = n & 1;
        barrier_wait(full(memory, n), (n >> 1) & 1);
        follow(o, reinterpret_cast<const float*>(memory + KEEPS) + side * ROWS, at);
#pragma unroll 1
        for (int quarter = 0; quarter < 4; quarter++) {
            u8* stage = value_stage(memory, next, at);
            values_are_in(stage, memory, work, walk.first + quarter * QUARTER, at);
            mix(o, weights + side * WEIGHT_BYTES, shared_address(stage), quarter, at);
            sync_warp();
            ask_values(ahead, stage, work, at);
            next = next + 1 < VALUE_STAGES ? next + 1 : 0;
        }
        if (walk.ends()) {
            store<F16>(o, reinterpret_cast<const float4*>(memory + SUMS) + side * ROWS,
                       reinterpret_cast<const float*>(memory + BASES) + side * ROWS,
                       sink(work.pieces.span(walk.item).slot), at);
            clear(o);
        }
        barrier_arrive(empty(memory, n));
        n++;
    }
}
