// What the warps of a block share: query rows, weights, and how tiles of the cache lie.
//
// Query rows are GROUP heads of 16 tokens, one m16 tile each. Four warps score: each holds all query
// rows against a quarter of a tile's positions (score.cuh). Four warps mix: each holds all query
// rows against a quarter of the columns (mix.cuh). Every byte of the cache so has one warp that
// loads it, turns it to 16 bits and multiplies it, in its own time; only weights pass from the
// scorers to the mixers, by way of two buffers. A multiprocessor's four schedulers have a scorer
// and a mixer each: one fills the tensor cores while the other takes exponentials.
//
// An FP8 tile becomes f16 in registers, exactly; queries are bf16 numbers held as f16, also exactly
// (|q| < 65504 after a norm; what f16 flushes is below 2^-24). Cache and queries in bf16: bf16
// products.
#pragma once

#include "verify_attention/pieces.cuh"
#include "verify_attention/rows.cuh"

constexpr int TOKENS = 16;                      // of one block of query rows
constexpr int ROWS = GROUP * TOKENS;
constexpr int POSITIONS = FP8 ? 128 : 64;       // of a tile: 32 KiB of keys, as much of values
constexpr int QUARTER = POSITIONS / 4;
constexpr int NS = QUARTER / 8;                 // n8 tiles of a scorer
constexpr int NO = 8;                           // n8 tiles of a mixer
constexpr int THREADS = 256;
constexpr int TEAM = THREADS / 2;               // scorers, then mixers

constexpr int QUERY_PITCH = 2 * WIDTH;
constexpr int WEIGHT_PITCH = 2 * POSITIONS;
constexpr int WEIGHT_BYTES = ROWS * WEIGHT_PITCH;
// Weights lie where the angles of 16 rows were.
constexpr int ANGLE_BYTES = TOKENS * WIDTH * 4;
constexpr int WEIGHTS_SPACE = 2 * WEIGHT_BYTES > ANGLE_BYTES ? 2 * WEIGHT_BYTES : ANGLE_BYTES;

// A scorer's keys come in halves of the columns, a mixer's values in quarters of the positions.
constexpr int KEY_PITCH = CACHE_BYTES / 2;
constexpr int KEY_STAGE = QUARTER * KEY_PITCH;
constexpr int KEY_STAGES = 3;
constexpr int VALUE_PITCH = CACHE_BYTES / 4;
constexpr int VALUE_STAGE = QUARTER * VALUE_PITCH;
constexpr int VALUE_STAGES = 6;

// Shared memory.
constexpr int QUERIES = 0;
constexpr int WEIGHTS = QUERIES + ROWS * QUERY_PITCH;  // [2]
constexpr int KEYS = WEIGHTS + WEIGHTS_SPACE;          // [4][KEY_STAGES]
constexpr int VALUES = KEYS + 4 * KEY_STAGES * KEY_STAGE;  // [4][VALUE_STAGES]
constexpr int TOPS = VALUES + 4 * VALUE_STAGES * VALUE_STAGE;  // float4 [2][ROWS], by quarter
constexpr int SUMS = TOPS + 2 * 16 * ROWS;      // float4 [2][ROWS], by quarter
constexpr int KEEPS = SUMS + 2 * 16 * ROWS;     // float [2][ROWS]
constexpr int BASES = KEEPS + 2 * 4 * ROWS;     // float [2][ROWS]
constexpr int BARRIERS = BASES + 2 * 4 * ROWS;  // u64 [4]
constexpr int WORK = BARRIERS + 32;             // Work
constexpr int FRESH = WORK + 64;                // rows of this call as the cache holds them

DEVICE float nothing() { return bits_float(0xff800000u); }  // the maximum of no numbers

// 16-byte chunks of a row are exchanged within groups of eight by the row's low bits, so that eight
// rows of one chunk lie in eight different bank groups.
DEVICE u32 swizzled(int row, int chunk, int pitch) {
    return static_cast<u32>(row * pitch + ((chunk ^ (row & 7)) << 4));
}

// The same for rows of 64 bytes, two of which share a line.
DEVICE u32 value_at(int row, int chunk) {
    if (!FP8) return swizzled(row, chunk, VALUE_PITCH);
    const int line = row >> 1;
    return static_cast<u32>(line * 128 + (((((row & 1) << 2) | chunk) ^ (line & 3)) << 4));
}

struct Lane {
    int lane, quarter;
    bool mixes;
    int g, t;  // row and column pair of a fragment
};

DEVICE Lane this_lane() {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    return {lane, warp & 3, warp >= 4, lane >> 2, lane & 3};
}

DEVICE void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if (FP8) mma_f16(d, a, b0, b1);
    else mma_bf16(d, a, b0, b1);
}

// What both teams know of the work; in shared memory, as a mixer has no registers to spare.
struct Work {
    const u8* keys;    // of this head
    const u8* values;
    int limit;         // what the cache holds; from here on the call's own rows, then zeros
    int rows;          // of the call at FRESH
    Pieces pieces;
};
static_assert(sizeof(Work) <= 64, "it has its place before FRESH");

DEVICE const u8* fresh_row(const u8* memory, const Work& work, int which, int position) {
    return memory + FRESH + (which * work.rows + position - work.limit) * CACHE_BYTES;
}

// Tile n of the block passes its weights in buffer n & 1.
DEVICE saddr barrier(const u8* memory, int i) { return shared_address(memory + BARRIERS) + 8 * i; }
DEVICE saddr full(const u8* memory, int n) { return barrier(memory, n & 1); }
DEVICE saddr empty(const u8* memory, int n) { return barrier(memory, 2 + (n & 1)); }

// By one thread; the block meets before any other use.
DEVICE void init(u8* memory, const Work& work) {
    *reinterpret_cast<Work*>(memory + WORK) = work;
    for (int i = 0; i < 4; i++) barrier_init(barrier(memory, i), TEAM);
    barrier_init_done();
}

DEVICE const Work& work_of(const u8* memory) {
    return *reinterpret_cast<const Work*>(memory + WORK);
}

// What a warp asks for next of the cache: a part of a tile.
struct Ahead {
    Walk<POSITIONS> walk;
    int part;
};

DEVICE Ahead ahead_of(const Work& work) { return {Walk<POSITIONS>(work.pieces), 0}; }

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
