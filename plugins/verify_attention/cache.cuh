// How tiles of the cache come into shared memory: the second warp of a pair asks for the quarters
// that both read, two tiles ahead.
#pragma once

#include "verify_attention/tile.cuh"

// What is attended to. From `limit` on: `rows` of the call itself, which lie at FRESH, then zeros.
struct Past {
    u8* memory;
    const u8* keys;  // of this head
    const u8* values;
    int limit, rows;
    Pieces pieces;
};

// Where one of a pair's two kinds of parts lies, and its barriers: the first half of the heads
// arrives at EMPTY when it has read a part, the second at FULL when what it asked for has come.
template <bool VALUES> struct Side {
    DEVICE static u8* part(u8* memory, int n, const Lane& at) {
        return memory + CACHE + ((2 * VALUES + (n & 1)) * 4 + at.quarter) * PART;
    }
    DEVICE static saddr full(const u8* memory, int n, const Lane& at) {
        return shared_address(memory + BARRIERS) + 8 * (at.quarter * 8 + 4 * VALUES + (n & 1));
    }
    DEVICE static saddr empty(const u8* memory, int n, const Lane& at) {
        return full(memory, n, at) + 16;
    }
    // Elements of a part's rows.
    static constexpr int LINES = VALUES ? POSITIONS : QUARTER;
    static constexpr int PITCH = VALUES ? VALUE_PITCH : CACHE_BYTES;
    static constexpr int CHUNKS = PITCH / 16;
    DEVICE static u32 place(int row, int chunk) {
        return VALUES ? value_at(row, chunk) : swizzled(row, chunk, CACHE_BYTES);
    }
    // The position of a part's first row, and its first byte of each.
    DEVICE static int position(int first, const Lane& at) {
        return VALUES ? first : first + at.quarter * QUARTER;
    }
    DEVICE static int column(const Lane& at) { return VALUES ? at.quarter * VALUE_PITCH : 0; }
};
typedef Side<false> Keys;
typedef Side<true> Values;

// By one thread; the block meets before any other use.
DEVICE void init(u8* memory) {
    for (int i = 0; i < 32; i++) barrier_init(shared_address(memory + BARRIERS) + 8 * i, 32);
    barrier_init_done();
}

// This warp's part of the tile at `first`, the n-th, asynchronously; zeros from the limit on.
template <class Of> DEVICE void ask(const Past& past, int n, int first, const Lane& at) {
    constexpr int STEP = 32 / Of::CHUNKS;
    const saddr to = shared_address(Of::part(past.memory, n, at));
    const int row = at.lane / Of::CHUNKS, chunk = at.lane % Of::CHUNKS;
    const int position = Of::position(first, at) + row;
    const u8* from = (Of::PITCH == CACHE_BYTES ? past.keys : past.values) +
                     static_cast<i64>(position) * CACHE_BYTES + Of::column(at) + chunk * 16;
    if (first + POSITIONS <= past.limit) {
#pragma unroll
        for (int i = 0; i < Of::LINES / STEP; i++)
            copy_async16(to + Of::place(row + i * STEP, chunk), from + i * STEP * CACHE_BYTES);
    } else {
#pragma unroll 1
        for (int i = 0; i < Of::LINES / STEP; i++)
            copy_async16(to + Of::place(row + i * STEP, chunk), from + i * STEP * CACHE_BYTES,
                         position + i * STEP < past.limit);
    }
}

// What was asked for, but for the last LATER commits, is in and may be read, the call's own rows
// included; it is of the tile at `first`, the n-th.
template <class Of, int LATER>
DEVICE void pass_on(const Past& past, int n, int first, const Lane& at) {
    copy_async_wait<LATER>();
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

// What the second half of the heads asks for and when: tile n + 2 while tile n is worked on.
struct Ahead {
    Walk<POSITIONS> walk;  // at tile n + 2
    int coming;            // where tile n + 1 begins; negative where there is none

    DEVICE Ahead(const Past& past) : walk(past.pieces), coming(-1) {}

    // The first two tiles.
    DEVICE void begin(const Past& past, const Lane& at) {
#pragma unroll 1
        for (int n = 0; n < 2; n++) {
            const bool valid = walk.valid(past.pieces);
            coming = valid ? walk.first : -1;
            if (valid) ask<Keys>(past, n, walk.first, at);
            copy_async_commit();
            if (valid) ask<Values>(past, n, walk.first, at);
            copy_async_commit();
            if (valid) walk.step(past.pieces);
        }
    }
    // This warp has read its part of tile n: it passes on the next, and asks for the one after.
    template <class Of> DEVICE void follow(const Past& past, int n, const Lane& at) const {
        sync_warp();
        if (coming >= 0) pass_on<Of, 1>(past, n + 1, coming, at);
        if (walk.valid(past.pieces)) {
            barrier_wait(Of::empty(past.memory, n, at), (n >> 1) & 1);
            ask<Of>(past, n, walk.first, at);
        }
        copy_async_commit();
    }
    DEVICE void step(const Past& past) {
        const bool valid = walk.valid(past.pieces);
        coming = valid ? walk.first : -1;
        if (valid) walk.step(past.pieces);
    }
};
