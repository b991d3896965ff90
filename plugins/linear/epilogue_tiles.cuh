// What the epilogue of half an n-tile, or of a narrow tile, needs besides its sums. Constant data
// is loaded into shared memory when the item begins, each warp using its own area: after the sums,
// dependent loads would be time in which nothing streams.
//
// Compile-time: see epilogue.cuh.
#pragma once
#include "linear/mma.cuh"

enum { NONE, SWIGLU, RESIDUAL, LOGITS };

struct Results {
    const u64* outputs;
    const float* scales;
    const int2* strips;
    const u16* residual;
    float* y_squares;
    u16* y_slabs;
    const void* next_weight;
    saddr row_scales;
    float next_offset;
    int rows;
};

// A warp's staging area: float32 scales of 32 columns, their int2 strips, their next norm's
// weights.
constexpr int STAGED_STRIPS = 4 * HALF_TILE;
constexpr int STAGED_WEIGHTS = STAGED_STRIPS + HALF_TILE;
constexpr int STAGED_BYTES = STAGED_WEIGHTS + 4 * HALF_TILE;  // per warp
constexpr int WEIGHT_BYTES = NEXT == 2 ? 4 : 2;

// Called by one warp: copies the data of `columns` columns (16 or 32) from packed column `column`
// on.
DEVICE void stage_end(saddr to, const Results& from, int column, int columns) {
    const int lane = threadIdx.x % 32;
    if (lane < columns / 4) copy_async16(to + 16 * lane, from.scales + column + 4 * lane);
    if (lane < columns / 16) {
        copy_async16(to + STAGED_STRIPS + 16 * lane, from.strips + column / 8 + 2 * lane);
    }
#if NEXT == 1 || NEXT == 2
    constexpr int COPIES = WEIGHT_BYTES / 2;  // per strip
    const int strip = lane < columns / 8 * COPIES ? from.strips[column / 8 + lane / COPIES].x : -1;
    if (strip >= 0) {
        copy_async16(to + STAGED_WEIGHTS + 16 * lane,
                     static_cast<const u8*>(from.next_weight) +
                         (strip & 0xffffff) * WEIGHT_BYTES + lane % COPIES * 16);
    }
#endif
    copy_async_commit();
}
// Waits until the warp's staged data has arrived.
DEVICE void wait_staged() {
    copy_async_wait<0>();
    sync_warp();
}

// The destination of a strip whose epilogue this warp runs.
struct Place {
    int2 strip;  // segment << 24 | column, or -1; width of the segment
    u64 output;

    // The first of this lane's two columns.
    DEVICE int column() const { return (strip.x & 0xffffff) + 2 * (threadIdx.x % 4); }
    DEVICE bool valid() const { return strip.x >= 0 && column() < strip.y; }
    DEVICE int at(int row) const { return row * strip.y + column(); }
};

DEVICE int2 strip_at(saddr at) {
    const uint2 words = load_shared8(at);
    return make_int2(words.x, words.y);
}
DEVICE float2 pair_at(saddr at) {
    const uint2 words = load_shared8(at);
    return make_float2(bits_float(words.x), bits_float(words.y));
}

// The next norm's weights of a pair of columns, as stored.
#if NEXT == 2
typedef float2 Raw;
DEVICE Raw raw_at(saddr at) { return pair_at(at); }
#else
typedef u32 Raw;
DEVICE Raw raw_at(saddr at) { return load_shared4(at); }
#endif
// Warps that share the epilogue of half an n-tile of a row tile, each with some of the rows: as many
// as there are for the halves that a block finishes at a time (PartialSumBuffer::share). Not
// with swiglu and logits, where few sums are added: that more warps run the code costs more there.
constexpr int AT_A_TIME = 2 * LANES > PARTS ? 2 * LANES / PARTS : 1;
constexpr int THERE = WARPS / AT_A_TIME / ROW_TILES;
constexpr int SHARERS = EPILOGUE == SWIGLU || EPILOGUE == LOGITS ? 1 : THERE < 4 ? THERE : 4;
constexpr int OWN_STRIPS = 4 / SHARERS;  // of a lane
constexpr int STRIP_LANES = 32 / SHARERS;

// What this warp finishes: the row tile, which of the block's halves, which share of its rows.
DEVICE int own_row_tile() { return threadIdx.x / 32 % ROW_TILES; }
DEVICE int own_half() { return threadIdx.x / 32 / ROW_TILES / SHARERS; }
DEVICE int own_part() { return threadIdx.x / 32 / ROW_TILES % SHARERS; }
// And this lane: rows own_row() and own_row() + 8 of the row tile, in strips own_strip(0) and, after
// it, every SHARERS-th. So a warp's lanes have all strips of a row, whose squares they can add.
DEVICE int own_row() { return own_part() * (8 / SHARERS) + threadIdx.x % STRIP_LANES / 4; }
DEVICE int own_strip(int j) { return j * SHARERS + threadIdx.x % 32 / STRIP_LANES; }

// A lane's epilogue data: a pair of columns of each of its strips.
struct EpilogueOperands {
    Place places[OWN_STRIPS];
    float2 scales[OWN_STRIPS];
    Raw factors[OWN_STRIPS];  // weight of the next norm
    u32 residual[2][OWN_STRIPS];

    // A value that depends on the loads of staged data, for `received`.
    DEVICE u32 last() const {
        u32 x = 0;
#pragma unroll
        for (int j = 0; j < OWN_STRIPS; j++) x ^= places[j].strip.x ^ float_bits(scales[j].x);
#if NEXT == 1
#pragma unroll
        for (int j = 0; j < OWN_STRIPS; j++) x ^= factors[j];
#elif NEXT == 2
#pragma unroll
        for (int j = 0; j < OWN_STRIPS; j++) x ^= float_bits(factors[j].x);
#endif
        return x;
    }
};

DEVICE float2 factor_of(const Results& to, Raw w) {
#if NEXT == 2
    return make_float2(to.next_offset + w.x, to.next_offset + w.y);
#else
    return make_float2(to.next_offset + bf16x2_low(w), to.next_offset + bf16x2_high(w));
#endif
}

// Called before any result is stored: the compiler could not move these loads before a store.
DEVICE void load_end(EpilogueOperands& end, const Results& from, saddr staged, int m) {
    const int pair = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < OWN_STRIPS; j++) {
        end.places[j].strip = strip_at(staged + STAGED_STRIPS + 8 * own_strip(j));
        end.scales[j] = pair_at(staged + 8 * (4 * own_strip(j) + pair));
#if NEXT == 1 || NEXT == 2
        if (end.places[j].valid()) {
            const u32 at = STAGED_WEIGHTS + sizeof(Raw) * (4 * own_strip(j) + pair);
            end.factors[j] = raw_at(staged + at);
        }
#endif
    }
#pragma unroll
    for (int j = 0; j < OWN_STRIPS; j++) {
        Place& place = end.places[j];
        if (EPILOGUE != SWIGLU || j % 2 == 0) {
            place.output = from.outputs[max(0, place.strip.x) >> 24];
        }
#if EPILOGUE == 2
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = 16 * m + 8 * i + own_row();
            u32& residual = end.residual[i][j];
            residual = 0;
            if (place.valid() && row < from.rows) {
                residual = load_shared_result(
                    reinterpret_cast<const u32*>(from.residual + place.at(row)));
            }
        }
#endif
    }
}
