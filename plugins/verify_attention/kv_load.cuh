// Loading tiles of the cache into shared memory. Warps w and w + 4 are a pair: they read the same
// quarters, and the second warp issues the copies.
#pragma once

#include "verify_attention/kv_tile.cuh"

// The keys and values to attend to. Positions from `limit` on are the `rows` of the call itself,
// which lie at FRESH in shared memory, then zeros.
struct Past {
    u8* memory;
    const u8* keys;  // of this head
    const u8* values;
    int limit, rows;
    Pieces pieces;
};

// There are eight barriers for each quarter. Its pair uses 0 to 5; some of the others are these.
constexpr int WEIGHTS_READ = 6;  // of quarter 0 and 1
constexpr int QUERIES_THERE = 7;

// Barrier i of this lane's pair. 0, 1: a part of keys is full, by tile & 1; 2, 3: a part of values.
// 4, 5: the first warp has finished a step, by step & 1; two, as it may finish the next step before
// the second warp has waited for this one.
DEVICE saddr pair_barrier(const u8* memory, int i, const Lane& at) {
    return shared_address(memory + BARRIERS) + 8 * (at.quarter * 8 + i);
}

DEVICE saddr turn_over(const u8* memory, int n, const Lane& at) {
    return pair_barrier(memory, 4 + (n & 1), at);
}

// The four warps of a half have loaded the weights of their last mixture.
DEVICE saddr weights_read(const u8* memory, const Lane& at) {
    return shared_address(memory + BARRIERS) + 8 * (at.half * 8 + WEIGHTS_READ);
}

// The layout of a pair's parts of keys (VALUES false) or values.
template <bool VALUES> struct Side {
    DEVICE static u8* part(u8* memory, int n, const Lane& at) {
        return memory + CACHE + ((2 * VALUES + (n & 1)) * 4 + at.quarter) * PART;
    }
    DEVICE static saddr full(const u8* memory, int n, const Lane& at) {
        return pair_barrier(memory, 2 * VALUES + (n & 1), at);
    }
    // Rows of a part.
    static constexpr int LINES = VALUES ? POSITIONS : QUARTER;
    static constexpr int PITCH = VALUES ? VALUE_PITCH : CACHE_BYTES;
    static constexpr int CHUNKS = PITCH / 16;
    DEVICE static u32 place(int row, int chunk) {
        return VALUES ? value_at(row, chunk) : swizzled(row, chunk, CACHE_BYTES);
    }
    // place(row + rows, chunk) is (place(row, chunk) ^ twist(rows)) + rows * PITCH where `rows` is
    // a multiple of a power of two above the row.
    DEVICE static constexpr u32 twist(int rows) { return VALUES && FP8 ? 0 : (rows & 7) << 4; }
    // The position of a part's first row, and the offset of its first byte in a cache row.
    DEVICE static int position(int first, const Lane& at) {
        return VALUES ? first : first + at.quarter * QUARTER;
    }
    DEVICE static int column(const Lane& at) { return VALUES ? at.quarter * VALUE_PITCH : 0; }
};
typedef Side<false> Keys;
typedef Side<true> Values;

// The queries of every fourth token, from the quarter's number on, have arrived. The first warp of
// the pair requests them, both warps prepare them.
DEVICE saddr queries_there(const u8* memory, const Lane& at) {
    return pair_barrier(memory, QUERIES_THERE, at);
}

// Called by the whole block, which must synchronise before any other use, except that a first warp
// may request its queries at once. `tokens`: number of query tokens.
DEVICE void init(u8* memory, int tokens, const Heads& heads, const Lane& at) {
    if (at.half || at.lane != 0) return;
    for (int i = 0; i < QUERIES_THERE; i++)
        barrier_init(pair_barrier(memory, i, at), i == WEIGHTS_READ ? THREADS / 2 : 32);
    barrier_init(queries_there(memory, at), 1);
    barrier_init_done();
    barrier_expect(queries_there(memory, at),
                   (tokens + 3 - at.quarter) / 4 * heads.count * HALF_QUERY);
}

// Starts copying this warp's part of the n-th tile, at `first`; zeros from the limit on.
template <class Of> DEVICE void copy_tile(const Past& past, int n, int first, const Lane& at) {
    constexpr int STEP = 32 / Of::CHUNKS;
    const saddr to = shared_address(Of::part(past.memory, n, at));
    const int row = at.lane / Of::CHUNKS, chunk = at.lane % Of::CHUNKS;
    const int position = Of::position(first, at) + row;
    const u8* from = (Of::PITCH == CACHE_BYTES ? past.keys : past.values) +
                     static_cast<i64>(position) * CACHE_BYTES + Of::column(at) + chunk * 16;
    if (first + POSITIONS <= past.limit) {
        const u32 place = Of::place(row, chunk);
#pragma unroll
        for (int i = 0; i < Of::LINES / STEP; i++)
            copy_async16(to + (place ^ Of::twist(i * STEP)) + i * STEP * Of::PITCH,
                         from + i * STEP * CACHE_BYTES);
    } else {
#pragma unroll 1
        for (int i = 0; i < Of::LINES / STEP; i++)
            copy_async16(to + Of::place(row + i * STEP, chunk), from + i * STEP * CACHE_BYTES,
                         position + i * STEP < past.limit);
    }
}

// The copies of the n-th tile, at `first`, have arrived: writes the call's own rows over it and
// lets the pair read it.
template <class Of> DEVICE void pass_on(const Past& past, int n, int first, const Lane& at) {
    const int from = Of::position(first, at);
    const int begin = max(from, past.limit), end = min(from + Of::LINES, past.limit + past.rows);
    if (begin < end) {
        sync_warp();
        u8* part = Of::part(past.memory, n, at);
        const u8* fresh = past.memory + FRESH + Of::column(at) +
                          (Of::PITCH == CACHE_BYTES ? 0 : past.rows * CACHE_BYTES);
#pragma unroll 1
        for (int i = at.lane; i < (end - begin) * Of::CHUNKS; i += 32) {
            const int position = begin + i / Of::CHUNKS, chunk = i % Of::CHUNKS;
            const u8* row = fresh + (position - past.limit) * CACHE_BYTES;
            *reinterpret_cast<uint4*>(part + Of::place(position - from, chunk)) =
                reinterpret_cast<const uint4*>(row)[chunk];
        }
    }
    barrier_arrive(Of::full(past.memory, n, at));
}

// The order in which the second warp of a pair issues copies. Step n computes the mixture of tile
// n - 1 and the scores of tile n.
struct KvPrefetcher {
    KvTileIterator<POSITIONS> tiles;  // at tile n + 2
    int coming;            // where tile n + 1 begins; negative if there is none

    // Before step 0: requests tile 0, and the keys of tile 1.
    DEVICE KvPrefetcher(const Past& past, const Lane& at) : tiles(past.pieces), coming(-1) {
        if (!at.half) return;
        const int first = tiles.first;
#pragma unroll 1
        for (int n = 0; n < 2; n++) {
            step(past);
            if (coming >= 0) copy_tile<Keys>(past, n, coming, at);
            if (n == 0) copy_async_commit();
        }
        copy_tile<Values>(past, 0, first, at);
        copy_async_commit();
    }
    // Waits for the keys of tile 0 and lets the pair score them.
    DEVICE void begin(const Past& past, int first, const Lane& at) const {
        copy_async_wait<1>();
        pass_on<Keys>(past, 0, first, at);
    }
    // At the end of step n, which scored the tile at `first`: provides what step n + 1 reads.
    DEVICE void provide(const Past& past, int n, int first, const Lane& at) const {
        copy_async_wait<0>();
        pass_on<Values>(past, n, first, at);
        if (coming >= 0) pass_on<Keys>(past, n + 1, coming, at);
    }
    // After step n, when the pair has read its keys and the previous values: requests what step
    // n + 2 reads.
    DEVICE void refill(const Past& past, int n, const Lane& at) {
        sync_warp();
        if (!at.alone) barrier_wait(turn_over(past.memory, n, at), (n >> 1) & 1);
        if (coming >= 0) copy_tile<Values>(past, n + 1, coming, at);
        if (tiles.valid(past.pieces)) copy_tile<Keys>(past, n + 2, tiles.first, at);
        copy_async_commit();
        step(past);
    }
    DEVICE void step(const Past& past) {
        const bool valid = tiles.valid(past.pieces);
        coming = valid ? tiles.first : -1;
        if (valid) tiles.step(past.pieces);
    }
};
