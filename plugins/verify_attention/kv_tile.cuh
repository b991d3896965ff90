// The shared memory of a block: query rows, weights and tiles of the cache.
//
// Query rows are GROUP heads of 16 tokens, one m16 tile each. There are eight warps. Warp w works
// on half w / 4 of the heads; of each cache tile it computes scores for quarter w % 4 of the
// positions and the mixture for quarter w % 4 of the columns. Weights are exchanged between the
// four warps of a half through shared memory. The halves wait for each other only for the cache:
// warps w and w + 4, which share a scheduler, also share quarters, and the second warp loads them.
// So one of them keeps the tensor cores busy while the other computes exponentials. If a block has
// only half of the heads, the second warps work on these, and the first ones only prepare queries.
//
// An FP8 tile is converted to f16 in registers, exactly. Queries are bf16 numbers held as f16, also
// exactly (|q| < 65504 after a norm; what f16 flushes is below 2^-24). With a bf16 cache, queries
// and products are bf16.
#pragma once

#include "verify_attention/split_kv.cuh"
#include "verify_attention/qkv_rows.cuh"

constexpr int TOKENS = 16;                      // of one thread block's query rows
constexpr int ROWS = GROUP * TOKENS;
constexpr int MT = GROUP / 2;                   // m16 tiles of a warp
constexpr int POSITIONS = FP8 ? 128 : 64;       // of a tile: 32 KiB of keys, 32 KiB of values
constexpr int QUARTER = POSITIONS / 4;
constexpr int NS = QUARTER / 8;                 // n8 tiles of a warp's scores
constexpr int NO = 8;                           // n8 tiles of a warp's mixture
constexpr int THREADS = 256;

constexpr int QUERY_BYTES = 2 * WIDTH;          // of a head; a token's heads are contiguous
constexpr int QUERY_PITCH = GROUP * QUERY_BYTES;
constexpr int HALF_QUERY = QUERY_PITCH / 2;     // a token's queries of half of the heads
constexpr int WEIGHT_PITCH = 2 * POSITIONS;
// Weights reuse the memory of the angles of 16 rows.
constexpr int WEIGHT_BYTES = ROWS * WEIGHT_PITCH, ANGLE_BYTES = TOKENS * 2 * HALF * 4;
constexpr int WEIGHT_SPACE = WEIGHT_BYTES > ANGLE_BYTES ? WEIGHT_BYTES : ANGLE_BYTES;
constexpr int VALUE_PITCH = CACHE_BYTES / 4;
constexpr int PART = QUARTER * CACHE_BYTES;     // a quarter of a tile's keys, or of its values

// Shared memory.
constexpr int QUERIES = 0;
constexpr int WEIGHTS = QUERIES + TOKENS * QUERY_PITCH;
constexpr int CACHE = WEIGHTS + WEIGHT_SPACE;   // [keys, values][tile & 1][quarter] parts
constexpr int TOPS = CACHE + 16 * PART;         // float4 [ROWS], by quarter
constexpr int SUMS = TOPS + 16 * ROWS;          // float4 [ROWS], by quarter
constexpr int BARRIERS = SUMS + 16 * ROWS;      // u64 [4][8], see kv_load.cuh
constexpr int FRESH = BARRIERS + 256;           // rows of this call as the cache holds them

DEVICE float nothing() { return bits_float(0xff800000u); }  // -infinity, the maximum of no numbers

// Swizzle: within groups of eight, 16-byte chunks of a row are permuted by the row's low bits, so
// that the same chunk of eight rows lies in eight different bank groups.
DEVICE u32 swizzled(int row, int chunk, int pitch) {
    return static_cast<u32>(row * pitch + ((chunk ^ (row & 7)) << 4));
}

// The same for a part of the values; an FP8 row has 64 bytes, so two rows share a line.
DEVICE u32 value_at(int row, int chunk) {
    if (!FP8) return swizzled(row, chunk, VALUE_PITCH);
    const int line = row >> 1;
    return static_cast<u32>(line * 128 + (((((row & 1) << 2) | chunk) ^ (line & 3)) << 4));
}

struct Lane {
    int lane, half, quarter;
    int heads;   // the half of the heads that the warp works on
    bool alone;  // whether the other warp of its pair does not
    int g, t;    // the lane's row and column pair in a fragment
};

DEVICE Lane this_lane() {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    return {lane, warp >> 2, warp & 3, warp >> 2, false, lane >> 2, lane & 3};
}

// Synchronises the four warps of one half of the heads.
DEVICE void sync_half(int half) {
    if (half) sync_some(2, THREADS / 2);
    else sync_some(1, THREADS / 2);
}
DEVICE bool sync_half_any(int half, bool x) {
    return half ? sync_some_any(2, THREADS / 2, x) : sync_some_any(1, THREADS / 2, x);
}

// Offset of a lane's pair of the first 64 columns in a query row, bytes. For FP8 keys, lane t's two
// pairs of each 16 columns are 4t, 4t + 1 and 4t + 2, 4t + 3, to match the four neighbouring bytes
// of a key that it reads.
DEVICE u32 query_at(int row, int lane) {
    const int chunk = FP8 ? (lane >> 3) * 2 + (lane & 1) : lane >> 2;
    const int word = FP8 ? (lane & 7) >> 1 : lane & 3;
    return swizzled(row, chunk, 0) + 4 * word;
}

// Stores a normalised, rotated query row; `to`: the place of this lane's first pair.
DEVICE void store_query(u8* to, const float (&x)[8]) {
#pragma unroll
    for (int j = 0; j < WORDS; j++) {
        u32 pair = pack_bf16x2(x[2 * j], x[2 * j + 1]);
        if (FP8) pair = pack_f16x2(bf16x2_low(pair), bf16x2_high(pair));
        *reinterpret_cast<u32*>(to + 128 * j) = pair;
    }
}
