// verify_attention: writes the call's key/value rows to the cache, then attends with its queries.
//
// Two forms; in each, a row's bits do not depend on where its block begins or how many rows it has,
// nor on later rows as long as their values are finite (the row multiplies them by zero):
//   short calls   attend_split (pieces of the cache in parallel, see split_kv.cuh) and combine
//   long calls    write_rows, then attend_dense (a block of threads per 16 tokens and head)
// Only the call's own rows come to attend_split from the previous kernel: the length, and the cache
// up to it, were written in an earlier step and are read before the wait.
//
// Compile-time: GROUP (query heads per key/value head: 2, 4, 6), FP8 (the caches' type; bf16
// otherwise), NORM_F32 (the norm weights' type; bf16 otherwise), HALF (angles of a row: half of the
// rotated columns). By what rows turn: nothing else is defined for their index; SHIFT adds a number to
// it (short calls only); MROPE takes the call's positions, with MROPE_HEIGHT and MROPE_WIDTH.
#ifndef MROPE
#define MROPE 0
#endif
#ifndef SHIFT
#define SHIFT 0
#endif
#include "cuda/prefetch.cuh"
#include "cuda/device.cuh"
#include "linear/row_norm.cuh"
#include "verify_attention/mainloop.cuh"
#include "verify_attention/qkv_rows.cuh"

constexpr float LOGIT = 0.0625f * 1.44269504f;  // 1 / sqrt(WIDTH), times log2(e) to use exp2

constexpr int WARPS = THREADS / 32;

// Starts copying the queries of 16 tokens, for one key/value head's group, to their place in shared
// memory. A warp issues its copies one after the other, so the first four warps issue four each.
// Tokens past the call's last one are left uninitialised: no row depends on another.
DEVICE void ask_queries(u8* memory, const u16* q, int count, int from, const Heads& heads,
                        const Lane& at) {
    if (at.half || at.lane != 0) return;
    const int begin = heads.first * HALF_QUERY;
    for (int t = at.quarter; t < count; t += 4) {
        const i64 row = static_cast<i64>(from + t) * gridDim.x + blockIdx.x;
        copy_bulk_kept(shared_address(memory + QUERIES) + t * QUERY_PITCH + begin,
                       q + row * GROUP * WIDTH + begin / 2, heads.count * HALF_QUERY,
                       queries_there(memory, at));
    }
}

// Normalises and rotates the queries in place. A warp's tokens are eight apart, so that all of its
// rows have the same swizzle.
DEVICE void turn_queries(u8* memory, const float (&w)[8], float eps, const float* table,
                         const Heads& heads) {
    static_assert(WARPS % 8 == 0, "see swizzled, queries_there");
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const u32 place = query_at(warp, lane);
#pragma unroll 1
    for (int t = warp; t < TOKENS; t += WARPS) {
        const Rotation by = turning(table + t * 2 * HALF, lane);
        u8* rows = memory + QUERIES + t * QUERY_PITCH + heads.first * HALF_QUERY;
#pragma unroll 1
        for (int half = 0; half < heads.count; half++, rows += HALF_QUERY) {
            float x[MT][8];
#pragma unroll
            for (int n = 0; n < MT; n++) eight(x[n], words(rows + n * QUERY_BYTES, lane));
            norm(x, w, eps);
            sync_warp();
#pragma unroll
            for (int n = 0; n < MT; n++) {
                rotate(x[n], by, lane);
                store_query(rows + n * QUERY_BYTES + place, x[n]);
            }
        }
    }
}

DEVICE float2 with_inverse(float x) { return make_float2(x, 1.0f / x); }

// Writes the call's rows to the cache. Called by one block per head.
DEVICE void write_out(const Past& past, u8* k, u8* v) {
    constexpr int CHUNKS = CACHE_BYTES / 16;
    const int count = CHUNKS * past.rows;
    const uint4* from = reinterpret_cast<const uint4*>(past.memory + FRESH);
    for (int i = threadIdx.x; i < 2 * count; i += THREADS) {
        const int which = i >= count, chunk = i - which * count;
        u8* to = (which ? v : k) + static_cast<i64>(past.limit) * CACHE_BYTES;
        reinterpret_cast<uint4*>(to)[chunk] = from[i];
    }
}

// Whether any of this block's pieces includes rows of the call itself.
DEVICE bool sees_fresh(const Pieces& pieces, int length) {
    for (int item = pieces.item; item < pieces.count; item += pieces.stride)
        if (pieces.span(item).stop > length) return true;
    return false;
}

// Prepares the queries and, if the block `needs` them, the call's rows in the cache's form, 16
// tokens at a time. The block's own 16 tokens come first: their angles, which its queries use too,
// have been computed already.
DEVICE void prepare(u8* memory, const Fresh& fresh, const float (&w)[8], const float (&w_key)[8],
                    float* table, const Turns& turns, int from, const Heads& heads,
                    bool needs, const Lane& at) {
    const int warp = threadIdx.x >> 5;
    const int blocks = needs ? static_cast<int>(gridDim.z) : 1;
    u8* const k = memory + FRESH;
#pragma unroll 1
    for (int n = 0; n < blocks; n++) {
        const int first = (from + n * TOKENS) % (gridDim.z * TOKENS);
        Pair pair;
        if (needs) load_pair(pair, fresh, first + warp, at.lane);
        if (n == 0) {
            barrier_wait(queries_there(memory, at), 0);
            turn_queries(memory, w, fresh.eps, table, heads);
        } else {
            angles(table, turns, first, TOKENS);
            sync_block();
        }
        if (needs)
            store_pair(k, k + fresh.rows * CACHE_BYTES, pair, fresh, w_key, table, first + warp, warp,
                       at.lane);
        sync_block();
    }
}

// Grid: heads, blocks that share the pieces of one, blocks of 16 tokens.
KERNEL void __launch_bounds__(THREADS, 1)
    attend_split(const u16* q, const u16* k, const u16* v, const void* __restrict__ q_norm,
                 const void* __restrict__ k_norm, const i32* length_at, u8* cache_k, u8* cache_v,
                 const float* __restrict__ scale_k, const float* __restrict__ scale_v,
                 const float* __restrict__ frequency, u16* mixtures, float2* stats,
                 const u8* __restrict__ next_packed, int next_share, int rows, int capacity,
                 int slots, float offset, float eps
#if SHIFT
                 , const i32* shift_at
#elif MROPE
                 , const i32* positions
#endif
    ) {
    DYNAMIC_SHARED(memory);
    Lane at = this_lane();
    float w[8], w_key[8];
    norm_weights(w, q_norm, offset, at.lane);
    norm_weights(w_key, k_norm, offset, at.lane);
    const float own = own_frequency(frequency);
    const float2 by_k = with_inverse(*scale_k), by_v = with_inverse(*scale_v);
    const int head = blockIdx.x, from = blockIdx.z * TOKENS, length = *length_at;
#if SHIFT
    const Turns turns = {own, length + *shift_at};
#elif MROPE
    const Turns turns = {own, positions, rows};
#else
    const Turns turns = {own, length};
#endif
    const int count = min(TOKENS, rows - from);
    const Pieces pieces = divided(length + from, length + from + count, blockIdx.y, gridDim.y);
    const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    if (pieces.item < 0) {
        if (threadIdx.x == 0) fetch_ahead(next_packed, block, next_share);
        return;
    }
    init(memory, count, pieces.heads, at);
    const i64 begin = static_cast<i64>(head) * capacity * CACHE_BYTES;
    const Past past = {memory, cache_k + begin, cache_v + begin, length, rows, pieces};
    KvPrefetcher prefetcher(past, at);
    // Blocks that start last find the previous kernel's results there, and everyone waits for these
    // blocks: so their queries are on the way before anything else is computed.
    if (!at.half) {
        wait_for_previous();
        ask_queries(memory, q, count, from, pieces.heads, at);
    }
    float* const table = reinterpret_cast<float*>(memory + WEIGHTS);
    angles(table, turns, from, TOKENS);
    sync_block();
    wait_for_previous();
    // A block with the last piece may have to write the call's rows to the cache, so it needs them.
    const bool last = blockIdx.y == 0;
    const Fresh fresh = {k, v, rows, static_cast<int>(gridDim.x), head, eps, by_k, by_v};
    prepare(memory, fresh, w, w_key, table, turns, from, pieces.heads,
            last || sees_fresh(pieces, length), at);
    // Only now, after the queries have arrived: the weights that the next kernel and the prefetch
    // load would delay them. From here on memory is mostly idle, except with a long cache.
    let_next_start();
    if (threadIdx.x == THREADS - 1) fetch_ahead(next_packed, block, next_share);
    if (last && from == 0) write_out(past, cache_k + begin, cache_v + begin);
    if (pieces.heads.count == 1) {
        if (!at.half) return;
        at.heads = pieces.heads.first, at.alone = true;
    }
    attend<false>(
        past, prefetcher, mul_rn(by_k.x, LOGIT), length + from,
        [=](int slot) {
            const i64 place = static_cast<i64>(blockIdx.z * gridDim.x + head) * slots + slot;
            return Piece{mixtures + place * ROWS * WIDTH, stats + place * ROWS, count};
        },
        at);
}

// With at most this many pieces, the loops over pieces end early: adding zeros takes time.
constexpr int FEW = 17;

// One block per row and query head, 64 columns per warp. Adds the row's pieces in order of position
// after loading all of them at once. With `slabs`, also writes the row times sigmoid(gate) in the
// form that the next product reads.
KERNEL void __launch_bounds__(WIDTH / 2)
    combine(const u16* mixtures, const float2* stats, const i32* length_at,
            const float* __restrict__ scale_v, const u16* gate, u16* o, u16* slabs, int rows,
            int kv_heads, int slots) {
    const float scale = *scale_v;
    let_next_start();
    wait_for_previous();
    const int lane = threadIdx.x & 31;
    const int t = blockIdx.x / (kv_heads * GROUP), head = blockIdx.x % (kv_heads * GROUP);
    const int position = *length_at + t, piece = piece_of(position);
    const int count = position / piece + 1;
    const i64 group = t / TOKENS * kv_heads + head / GROUP;
    const i64 row = (group * slots + slots_of(piece)) * ROWS + head % GROUP * TOKENS + t % TOKENS;
    stats += row;
    const u32* from = reinterpret_cast<const u32*>(mixtures + row * WIDTH) + threadIdx.x;
    const int column = head * WIDTH + piece_column(threadIdx.x);
    const i64 own = (static_cast<i64>(t) * kv_heads * GROUP * WIDTH + column) / 2;

    u32 bits[PIECES], gate_bits = 0;
    if (slabs) gate_bits = reinterpret_cast<const u32*>(gate)[own];
#pragma unroll
    for (int s = 0; s < PIECES; s++) {
        if (s == FEW && count <= FEW) break;
        bits[s] = s < count ? from[s * (ROWS * WIDTH / 2)] : 0;
    }
    // Lane s computes the weight of piece s; all lanes compute that of the 33rd piece.
    float2 mine = make_float2(nothing(), 0.0f), extra = mine;
    if (lane < count) mine = stats[lane * ROWS];
    if (count == PIECES) extra = stats[(PIECES - 1) * ROWS];
    float2 by_gate = make_float2(0.0f, 0.0f);  // computed here while the pieces are loading
    if (slabs)
        by_gate = make_float2(sigmoid(bf16x2_low(gate_bits)), sigmoid(bf16x2_high(gate_bits)));
    float best = fmaxf(mine.x, extra.x);
#pragma unroll
    for (int far = 16; far >= 1; far >>= 1) best = fmaxf(best, shuffle_xor(best, far));
    const float weight = mul_rn(mine.y, exp2_approx(mine.x - best));
    const float last = mul_rn(extra.y, exp2_approx(extra.x - best));
    float total = 0.0f, x = 0.0f, y = 0.0f;
#pragma unroll
    for (int s = 0; s < PIECES; s++) {
        if (s == FEW && count <= FEW) break;
        // Pieces past the last one contribute nothing: their weight and values are zero.
        const float w = s < PIECES - 1 ? shuffle(weight, s) : last;
        total = add_rn(total, w);
        x = fma_rn(w, FP8 ? f16x2_low(bits[s]) : bf16x2_low(bits[s]), x);
        y = fma_rn(w, FP8 ? f16x2_high(bits[s]) : bf16x2_high(bits[s]), y);
    }
    const float by = scale / total;
    const u32 pair = pack_bf16x2(x * by, y * by);
    reinterpret_cast<u32*>(o)[own] = pair;
    if (!slabs) return;
    slabs += slab_offset(rows, t, column) + column % 8;
    *reinterpret_cast<u32*>(slabs) =
        pack_bf16x2(bf16x2_low(pair) * by_gate.x, bf16x2_high(pair) * by_gate.y);
}

// Writes the call's rows to the cache. Grid: blocks of 16 tokens, key/value heads.
KERNEL void __launch_bounds__(THREADS)
    write_rows(const u16* k, const u16* v, const void* __restrict__ k_norm, const i32* length_at,
               u8* cache_k, u8* cache_v, const float* __restrict__ scale_k,
               const float* __restrict__ scale_v, const float* __restrict__ frequency, int rows,
               int capacity, float offset, float eps
#if MROPE
               , const i32* positions
#endif
    ) {
    __shared__ float table[TOKENS * WIDTH];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    float w[8];
    norm_weights(w, k_norm, offset, lane);
    const float own = own_frequency(frequency);
    const float2 by_k = with_inverse(*scale_k), by_v = with_inverse(*scale_v);
    let_next_start();
    wait_for_previous();
    const int length = *length_at, from = blockIdx.x * TOKENS, head = blockIdx.y;
    const Fresh fresh = {k, v, rows, static_cast<int>(gridDim.y), head, eps, by_k, by_v};
    Pair pair;
    load_pair(pair, fresh, from + warp, lane);
#if MROPE
    angles(table, {own, positions, rows}, from, TOKENS);
#else
    angles(table, {own, length}, from, TOKENS);
#endif
    sync_block();
    const i64 to = (static_cast<i64>(head) * capacity + length) * CACHE_BYTES;
    store_pair(cache_k + to, cache_v + to, pair, fresh, w, table, from + warp, warp, lane);
}

// Grid: key/value heads, 1, blocks of 16 tokens, those that see the most positions first.
KERNEL void __launch_bounds__(THREADS, 1)
    attend_dense(const u16* q, const void* __restrict__ q_norm, const i32* length_at,
                 const u8* cache_k, const u8* cache_v, const float* __restrict__ scale_k,
                 const float* __restrict__ scale_v, const float* __restrict__ frequency, u16* o,
                 int rows, int capacity, float offset, float eps
#if MROPE
                 , const i32* positions
#endif
    ) {
    DYNAMIC_SHARED(memory);
    const Lane at = this_lane();
    float w[8];
    norm_weights(w, q_norm, offset, at.lane);
    const float own = own_frequency(frequency);
    let_next_start();
    wait_for_previous();
    const int head = blockIdx.x, from = (gridDim.z - 1 - blockIdx.z) * TOKENS;
    const int count = min(TOKENS, rows - from);
    const int length = *length_at, end = length + from + count;
    init(memory, count, BOTH, at);
    const i64 begin = static_cast<i64>(head) * capacity * CACHE_BYTES;
    const Past past = {memory, cache_k + begin, cache_v + begin, end, 0, undivided(end)};
    KvPrefetcher prefetcher(past, at);
    float* const table = reinterpret_cast<float*>(memory + WEIGHTS);
#if MROPE
    angles(table, {own, positions, rows}, from, TOKENS);
#else
    angles(table, {own, length}, from, TOKENS);
#endif
    sync_block();
    ask_queries(memory, q, count, from, BOTH, at);
    barrier_wait(queries_there(memory, at), 0);
    turn_queries(memory, w, eps, table, BOTH);
    sync_block();
    attend<true>(
        past, prefetcher, mul_rn(*scale_k, LOGIT), length + from,
        [=](int) {
            const i64 stride = static_cast<i64>(gridDim.x) * GROUP * WIDTH;
            return Output{o + from * stride + static_cast<i64>(head) * GROUP * WIDTH, stride, *scale_v,
                          count};
        },
        at);
}
