// verify_attention: query rows against the key/value cache, after writing the call's own rows.
//
// Two forms, each with the same bits for a row wherever its block began and however full it was:
//   short calls   attend_split (pieces of the cache in parallel, see segments.cuh) and combine
//   long calls    write_rows, then attend_dense (every 16 tokens walk the cache by themselves)
// Compile-time: GROUP (query heads of a key/value head: 2, 4, 6), FP8 (the caches' type; bf16
// otherwise), NORM_F32 (the norm weights' type; bf16 otherwise).
#include "cuda/device.cuh"
#include "verify_attention/rows.cuh"
#include "verify_attention/segments.cuh"
#include "verify_attention/tile.cuh"

constexpr float LOGIT = 0.0625f * 1.44269504f;  // 1 / sqrt(WIDTH), and exp2 for exp

constexpr int WARPS = THREADS / 32;
constexpr int BATCH = GROUP == 6 ? 6 : 4;  // query rows that a warp prepares side by side

// 16 tokens of one key/value head's group as they came, each row where its queries will lie; zeros
// past the call's last. Warp w holds rows w, w + 8, ..., lane l 16 bytes of each.
DEVICE void load_queries(u8* memory, const u16* q, int rows, int from) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const i64 stride = static_cast<i64>(gridDim.y) * GROUP * WIDTH;
    const saddr to = shared_address(memory + QUERIES) + 16 * lane;
#pragma unroll
    for (int i = 0; i < ROWS / WARPS; i++) {
        const int row = warp + i * WARPS, head = row / TOKENS, t = from + row % TOKENS;
        const u16* at = q + t * stride + (blockIdx.y * GROUP + head) * WIDTH + 8 * lane;
        copy_async16(to + row * QUERY_PITCH, at, t < rows);
    }
    copy_async_commit();
}

// Normalised and rotated in place. Token t of the block turns by row t + `turned`.
DEVICE void turn_queries(u8* memory, const float (&w)[8], float eps, const Rotation& by,
                         int turned) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll 1
    for (int first = warp; first < ROWS; first += BATCH * WARPS) {
        float x[BATCH][8];
        int angle[BATCH];
#pragma unroll
        for (int n = 0; n < BATCH; n++) {
            const int row = first + n * WARPS;
            eight(x[n], reinterpret_cast<const uint4*>(memory + QUERIES + row * QUERY_PITCH)[lane]);
            angle[n] = row % TOKENS + turned;
        }
        turn(x, w, by, angle, eps, lane);
        sync_warp();
#pragma unroll
        for (int n = 0; n < BATCH; n++)
            store_query(memory + QUERIES, first + n * WARPS, x[n], lane);
    }
}

DEVICE float2 with_inverse(float x) { return make_float2(x, 1.0f / x); }

// The call's rows that lie in the tile at `first`, over what was loaded there.
DEVICE void overlay(u8* stage, const u8* memory, int rows, int length, int first) {
    constexpr int CHUNKS = CACHE_BYTES / 16;
    const int begin = max(length, first), end = min(length + rows, first + POSITIONS);
    const int count = (end - begin) * CHUNKS;
    for (int i = threadIdx.x; i < 2 * count; i += THREADS) {
        const int which = i >= count, chunk = i - which * count;
        const int position = begin + chunk / CHUNKS, column = chunk % CHUNKS;
        const u8* from = memory + FRESH + (which * rows + position - length) * CACHE_BYTES;
        *reinterpret_cast<uint4*>(stage + which * TILE +
                                  swizzled(position - first, column, CACHE_BYTES)) =
            reinterpret_cast<const uint4*>(from)[column];
    }
}

// The call's rows into the cache, shared out over the `blocks` that work for this head.
DEVICE void write_out(const u8* memory, u8* k, u8* v, int rows, int length, int blocks) {
    constexpr int CHUNKS = CACHE_BYTES / 16;
    for (int t = blockIdx.x; t < rows; t += blocks)
        for (int i = threadIdx.x; i < 2 * CHUNKS; i += THREADS) {
            const int which = i >= CHUNKS, column = i % CHUNKS;
            u8* to = (which ? v : k) + static_cast<i64>(length + t) * CACHE_BYTES;
            const u8* from = memory + FRESH + (which * rows + t) * CACHE_BYTES;
            reinterpret_cast<uint4*>(to)[column] = reinterpret_cast<const uint4*>(from)[column];
        }
}

// Grid: blocks that share the pieces of one head, heads, blocks of 16 tokens. A block takes pieces
// from the end of what is visible, longest first, until its head's counter says there are none.
KERNEL void __launch_bounds__(THREADS, 1)
    attend_split(const u16* q, const u16* k, const u16* v, const void* __restrict__ q_norm,
                 const void* __restrict__ k_norm, const i32* length_at, u8* cache_k, u8* cache_v,
                 const float* __restrict__ scale_k, const float* __restrict__ scale_v,
                 const float* __restrict__ frequency, u16* mixtures, float2* stats, u32* taken,
                 int rows, int capacity, int half, int pieces, float offset, float eps) {
    DYNAMIC_SHARED(memory);
    const Lane at = this_lane();
    float w[8], w_key[8];
    norm_weights(w, q_norm, offset, at.lane);
    norm_weights(w_key, k_norm, offset, at.lane);
    const float own = own_frequency(frequency, half);
    const float2 by_k = with_inverse(*scale_k), by_v = with_inverse(*scale_v);
    let_next_start();
    wait_for_previous();
    const int head = blockIdx.y, from = blockIdx.z * TOKENS;
    const int length = *length_at;
    load_queries(memory, q, rows, from);
    const int end = length + min(rows, from + TOKENS);  // of what any row of the block sees
    const int live = segment_of(end - 1) + 1;
    int item = blockIdx.x;
    if (item >= live) {
        copy_async_wait<0>();  // nothing may still be coming in when the block ends
        return;
    }

    u8* const keys = cache_k + static_cast<i64>(head) * capacity * CACHE_BYTES;
    u8* const values = cache_v + static_cast<i64>(head) * capacity * CACHE_BYTES;
    const int group = blockIdx.z * gridDim.y + head;
    int* const next = reinterpret_cast<int*>(memory + NEXT);
    int first = segment_start(live - 1 - item);
    Pipe pipe = {memory, keys, values, length, 0, 0};
    load_tile(pipe.stage(0), keys, values, first, length);
    if (threadIdx.x == 0) init(pipe);

    // The angles lie where the second tile will.
    const Rotation by = {reinterpret_cast<float*>(memory + TILES + STAGE), half};
    const Fresh fresh = {k, v, rows, static_cast<int>(gridDim.y), head, eps, by_k, by_v};
    Pair pair;
    load_pair(pair, fresh, threadIdx.x >> 5, at.lane);
    angles(by, own, length, gridDim.z * TOKENS);
    copy_async_wait<1>();
    sync_block();
    turn_queries(memory, w, eps, by, from);
    for (int t = threadIdx.x >> 5; t < rows; t += TOKENS) {
        store_pair(memory + FRESH, memory + FRESH + rows * CACHE_BYTES, pair, fresh, w_key, by, t,
                   t, at.lane);
        load_pair(pair, fresh, t + TOKENS, at.lane);
    }
    const float logit = mul_rn(fresh.scale_k.x, LOGIT);

    Running r;
    bool wrote = blockIdx.z != 0;
    u32 turn = 0;
    while (true) {
        const int segment = live - 1 - item;
        const int stop = min(segment_start(segment + 1), end);
        reset(r);
        arrived(pipe, pipe.tile);
        for (bool begins = true; first < stop; first += POSITIONS, begins = false) {
            const bool more = first + POSITIONS < stop;
            if (!more && threadIdx.x == 0)
                turn = take(taken + group);  // needed after the tile, when it will have come
            barrier_wait(pipe.full(pipe.tile), (pipe.tile >> 1) & 1);
            if (first + POSITIONS > length && first < length + rows) {
                overlay(pipe.stage(pipe.tile), memory, rows, length, first);
                sync_block();
            }
            absorb(r, pipe, logit, length + from, first, begins, more, at);
        }
        pipe.piece++;
        if (threadIdx.x == 0) {
            *next = static_cast<int>(gridDim.x + turn);
            // As many turns are taken as there are pieces: this was the last.
            if (turn == static_cast<u32>(live - 1)) taken[group] = 0;
        }
        sync_block();
        item = *next;
        if (item < live) {
            first = segment_start(live - 1 - item);
            load_tile(pipe.stage(pipe.tile), keys, values, first, length);
        }
        if (!wrote)
            write_out(memory, keys, values, rows, length,
                      min(live, static_cast<int>(gridDim.x)));
        wrote = true;
        add_up(r, memory, at);
        const i64 slot = static_cast<i64>(group) * pieces + segment;
        store_rows<FP8 != 0>(r, mixtures + slot * ROWS * WIDTH, WIDTH, TOKENS * WIDTH, 1.0f,
                             rows - from, at);
        if (at.quarter == 0 && at.t == 0)
#pragma unroll
            for (int i = 0; i < MT; i++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int row = (at.half * MT + i) * TOKENS + 8 * h + at.g;
                    stats[slot * ROWS + row] = make_float2(r.best[i][h], r.sum[i][h]);
                }
        if (item >= live) break;
    }
}

constexpr int COMBINE_WARPS = 4;
constexpr int AHEAD = 8;  // pieces of a row that are loaded at once

// A lane's columns of pieces first .. first + AHEAD - 1 of a row; zeros from `count` on.
DEVICE void load_pieces(uint4 (&to)[AHEAD], const uint4* from, int first, int count) {
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        to[i] = make_uint4(0, 0, 0, 0);
        if (first + i < count) to[i] = from[static_cast<i64>(first + i) * (ROWS * WIDTH / 8)];
    }
}

DEVICE void add_piece(float (&sum)[8], float& total, const uint4& bits, float weight) {
    const u32 pairs[4] = {bits.x, bits.y, bits.z, bits.w};
    total = add_rn(total, weight);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float x = FP8 ? f16x2_low(pairs[i]) : bf16x2_low(pairs[i]);
        const float y = FP8 ? f16x2_high(pairs[i]) : bf16x2_high(pairs[i]);
        sum[2 * i] = fma_rn(weight, x, sum[2 * i]);
        sum[2 * i + 1] = fma_rn(weight, y, sum[2 * i + 1]);
    }
}

// One warp a row and query head: its pieces in order of position.
KERNEL void __launch_bounds__(32 * COMBINE_WARPS)
    combine(const u16* mixtures, const float2* stats, const i32* length_at,
            const float* __restrict__ scale_v, u16* o, int rows, int kv_heads, int pieces) {
    const float scale = *scale_v;
    let_next_start();
    wait_for_previous();
    const int lane = threadIdx.x & 31;
    const int index = blockIdx.x * COMBINE_WARPS + (threadIdx.x >> 5);
    if (index >= rows * kv_heads * GROUP) return;
    const int t = index / (kv_heads * GROUP), head = index % (kv_heads * GROUP);
    const int count = segment_of(*length_at + t) + 1;
    const i64 group = t / TOKENS * kv_heads + head / GROUP;
    const i64 row = group * pieces * ROWS + head % GROUP * TOKENS + t % TOKENS;
    stats += row;
    const uint4* from = reinterpret_cast<const uint4*>(mixtures + row * WIDTH) + lane;

    uint4 bits[AHEAD], more[AHEAD];
    load_pieces(bits, from, 0, count);
    float best = nothing();
#pragma unroll 1
    for (int s = lane; s < count; s += 32) best = fmaxf(best, stats[s * ROWS].x);
#pragma unroll
    for (int far = 16; far >= 1; far >>= 1) best = fmaxf(best, shuffle_xor(best, far));
    float weight = 0.0f, total = 0.0f, sum[8] = {};
    for (int first = 0; first < count; first += AHEAD) {
        load_pieces(more, from, first + AHEAD, count);
        if (first % 32 == 0) {
            // Nothing past the last piece: a weight of zero on zeros.
            weight = 0.0f;
            if (first + lane < count) {
                const float2 piece = stats[(first + lane) * ROWS];
                weight = mul_rn(piece.y, exp2_approx(piece.x - best));
            }
        }
#pragma unroll
        for (int s = 0; s < AHEAD; s++) {
            add_piece(sum, total, bits[s], shuffle(weight, first % 32 + s));
            bits[s] = more[s];
        }
    }
    const float by = scale / total;
    reinterpret_cast<uint4*>(o + static_cast<i64>(index) * WIDTH)[lane] =
        make_uint4(pack_bf16x2(sum[0] * by, sum[1] * by), pack_bf16x2(sum[2] * by, sum[3] * by),
                   pack_bf16x2(sum[4] * by, sum[5] * by), pack_bf16x2(sum[6] * by, sum[7] * by));
}

// Grid: blocks of 16 tokens, key/value heads. The call's rows into the cache.
KERNEL void __launch_bounds__(THREADS)
    write_rows(const u16* k, const u16* v, const void* __restrict__ k_norm, const i32* length_at,
               u8* cache_k, u8* cache_v, const float* __restrict__ scale_k,
               const float* __restrict__ scale_v, const float* __restrict__ frequency, int rows,
               int capacity, int half, float offset, float eps) {
    __shared__ float table[TOKENS * WIDTH];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    float w[8];
    norm_weights(w, k_norm, offset, lane);
    const float own = own_frequency(frequency, half);
    const float2 by_k = with_inverse(*scale_k), by_v = with_inverse(*scale_v);
    let_next_start();
    wait_for_previous();
    const int length = *length_at, from = blockIdx.x * TOKENS, head = blockIdx.y;
    const Rotation by = {table, half};
    const Fresh fresh = {k, v, rows, static_cast<int>(gridDim.y), head, eps, by_k, by_v};
    Pair pair;
    load_pair(pair, fresh, from + warp, lane);
    angles(by, own, length + from, TOKENS);
    sync_block();
    const i64 to = (static_cast<i64>(head) * capacity + length) * CACHE_BYTES;
    store_pair(cache_k + to, cache_v + to, pair, fresh, w, by, from + warp, warp, lane);
}

// Grid: 1, key/value heads, blocks of 16 tokens, those that see most first.
KERNEL void __launch_bounds__(THREADS, 1)
    attend_dense(const u16* q, const void* __restrict__ q_norm, const i32* length_at,
                 const u8* cache_k, const u8* cache_v, const float* __restrict__ scale_k,
                 const float* __restrict__ scale_v, const float* __restrict__ frequency, u16* o,
                 int rows, int capacity, int half, float offset, float eps) {
    DYNAMIC_SHARED(memory);
    const Lane at = this_lane();
    float w[8];
    norm_weights(w, q_norm, offset, at.lane);
    const float own = own_frequency(frequency, half);
    let_next_start();
    wait_for_previous();
    const int head = blockIdx.y, from = (gridDim.z - 1 - blockIdx.z) * TOKENS;
    const int length = *length_at, end = length + min(rows, from + TOKENS);
    load_queries(memory, q, rows, from);
    const u8* const keys = cache_k + static_cast<i64>(head) * capacity * CACHE_BYTES;
    const u8* const values = cache_v + static_cast<i64>(head) * capacity * CACHE_BYTES;
    Pipe pipe = {memory, keys, values, end, 0, 0};
    load_tile(pipe.stage(0), keys, values, 0, end);
    if (threadIdx.x == 0) init(pipe);
    const Rotation by = {reinterpret_cast<float*>(memory + TILES + STAGE), half};
    angles(by, own, length + from, TOKENS);
    copy_async_wait<1>();
    sync_block();
    turn_queries(memory, w, eps, by, 0);
    const float logit = mul_rn(*scale_k, LOGIT);

    Running r;
    reset(r);
    arrived(pipe, 0);
    for (int first = 0; first < end; first += POSITIONS) {
        barrier_wait(pipe.full(pipe.tile), (pipe.tile >> 1) & 1);
        absorb(r, pipe, logit, length + from, first, first == 0, first + POSITIONS < end, at);
    }
    add_up(r, memory, at);
    const i64 stride = static_cast<i64>(gridDim.y) * GROUP * WIDTH;
    store_rows<false>(r, o + from * stride + static_cast<i64>(head) * GROUP * WIDTH, stride, WIDTH,
                      *scale_v, rows - from, at);
}
