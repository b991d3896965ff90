// From the sums of an item to rows: the two halves of each step added, the pieces of a group that
// several blocks made added in order of k by the last of them, then what comes after the product.
//
// Compile-time: EPILOGUE 0 none, 1 swiglu, 2 residual, 3 float32 logits; ROW_SCALE, whether the sums
// of a row are multiplied by its 1 / rms; NEXT, what else is left of rows that the next kernel norms:
// 0 nothing, 1 and 2 the rows times offset + weight, the weight bf16 or float32.
#pragma once
#include "linear/products.cuh"

enum { NONE, SWIGLU, RESIDUAL, LOGITS };
constexpr int GROUP_COLUMNS = 256;
constexpr int MOST_SEGMENTS = 16;
constexpr int MOST_ROWS = 32;

// Half a warp pair's sums: 4 strips of 8 columns.
typedef float Own[ROW_TILES][4][4];

// What the end of an item needs, in shared memory. Two items' columns: one may be at its end while
// the next one's are on their way.
struct Side {
    float scales[2][GROUP_COLUMNS];
    int2 strips[2][GROUP_COLUMNS / 8];  // segment << 24 | column, or -1; width of the segment
    int4 items[2][ITEM_WORDS];
    float y_squares[WARPS][MOST_ROWS];
    float x_squares[WARPS][MOST_ROWS];
    u64 outputs[MOST_SEGMENTS];
    bool last[2];
};

struct Results {
    const float* scales;
    const int2* strips;
    const u16* residual;
    float* y_squares;
    u16* y_normed;
    const void* next_weight;
    float4* partials;
    u32* arrivals;
    float next_offset, k, eps;
    int rows;
};

// Requests what finish() will want to know of item `at`; constants, so at any time.
DEVICE void request_side(Side& side, const Results& to, const int4* items, int at, int tiles,
                         int column) {
    const int thread = threadIdx.x, parity = at & 1;
    if (thread < GROUP_COLUMNS / 4) {
        if (thread < 16 * tiles) {
            copy_async16(shared_address(&side.scales[parity][4 * thread]),
                         to.scales + column + 4 * thread);
        }
    } else if (thread < 128) {
        const int strip = (thread - 64) % 32;
        if (thread >= 96 && strip < ITEM_WORDS) {
            copy_async16(shared_address(&side.items[parity][strip]), items + ITEM_WORDS * at + strip);
        } else if (thread < 96 && strip >= 8 * tiles) {
            side.strips[parity][strip] = make_int2(-1, 0);
        } else if (thread < 96 && strip % 2 == 0) {
            copy_async16(shared_address(&side.strips[parity][strip]),
                         to.strips + column / 8 + strip);
        }
    }
    copy_async_commit();
}

constexpr int ROOM_BYTES = WARPS * ROW_TILES * 2 * 32 * 16;

// sums -> own: strips 4 h.. of the n-tile for the warp of parity h, both parities added. Two strips
// at a time, so that the room is small.
DEVICE void exchange(Own& own, const Sums& sums, float4* room) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bool second = warp & 1;
#pragma unroll
    for (int turn = 0; turn < 4; turn += 2) {
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const float(&low)[4] = sums[m][turn + j];
                const float(&high)[4] = sums[m][4 + turn + j];
                room[((warp * ROW_TILES + m) * 2 + j) * 32 + lane] =
                    second ? make_float4(low[0], low[1], low[2], low[3])
                           : make_float4(high[0], high[1], high[2], high[3]);
            }
        }
        sync_some(1 + warp / 2, 64);
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const float4 other = room[(((warp ^ 1) * ROW_TILES + m) * 2 + j) * 32 + lane];
                const float parts[4] = {other.x, other.y, other.z, other.w};
                const int strip = turn + j;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float mine = second ? sums[m][4 + strip][i] : sums[m][strip][i];
                    // Even steps first, whichever warp adds.
                    own[m][strip][i] = second ? parts[i] + mine : mine + parts[i];
                }
            }
        }
        sync_some(1 + warp / 2, 64);
    }
}

constexpr int PART = ROW_TILES * 4 * 32 * WARPS;  // float4 of one item's sums

DEVICE void write_part(const Own& own, float4* part) {
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            part[(m * 4 + j) * 32 * WARPS + threadIdx.x] =
                make_float4(own[m][j][0], own[m][j][1], own[m][j][2], own[m][j][3]);
        }
    }
}

// In order of k, whoever made them.
DEVICE void add_parts(Own& own, const float4* part, int parts) {
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) own[m][j][i] = 0.0f;
        }
    }
#pragma unroll ROW_TILES == 1 ? 4 : 2
    for (int p = 0; p < parts; p++, part += PART) {
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float4 x =
                    load_shared_result(part + (m * 4 + j) * 32 * WARPS + threadIdx.x);
                own[m][j][0] += x.x;
                own[m][j][1] += x.y;
                own[m][j][2] += x.z;
                own[m][j][3] += x.w;
            }
        }
    }
}

// Of one lane's rows 16 m + 8 r + lane / 4: the sums of squares of what it stored.
typedef float Squares[ROW_TILES][2];

struct Place {
    int2 strip;
    u64 output;

    // Of this lane's pair of columns.
    DEVICE int column() const { return (strip.x & 0xffffff) + 2 * (threadIdx.x % 4); }
    DEVICE bool valid() const { return strip.x >= 0 && column() < strip.y; }
    DEVICE i64 at(int row) const { return static_cast<i64>(row) * strip.y + column(); }
};

DEVICE Place place(const Side& side, int parity, int j) {
    const int warp = threadIdx.x / 32;
    const int2 strip = side.strips[parity][4 * warp + j];
    return {strip, strip.x < 0 ? 0 : side.outputs[strip.x >> 24]};
}

DEVICE u32 store_pair(const Place& to, int row, float low, float high) {
    const u32 pair = pack_bf16x2(low, high);
    *reinterpret_cast<u32*>(reinterpret_cast<u16*>(to.output) + to.at(row)) = pair;
    return pair;
}

DEVICE float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// A part of each row's sum of squares (lane: row), from [chunks, 32]. Every block reads the same few
// lines at the same time, so each line once, whole.
DEVICE void read_squares(Side& side, const float* squares, int k) {
#if ROW_SCALE
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float sum = 0.0f;
    for (int c = warp; c * GROUP_COLUMNS < k; c += WARPS) {
        sum += load_shared_result(squares + c * MOST_ROWS + lane);
    }
    side.x_squares[warp][lane] = sum;
#endif
}

// 1 / rms of a row.
DEVICE float row_scale(const Side& side, const Results& to, int row) {
#if ROW_SCALE
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += side.x_squares[w][row];
    return rsqrtf(sum / to.k + to.eps);
#else
    return 1.0f;
#endif
}

// offset + weight of the next norm, for a lane's pairs of columns. Loaded before anything is stored:
// the compiler cannot know that no store changes a weight, and would wait for each in turn.
typedef float2 Factors[4];

DEVICE void load_factors(Factors& factors, const Side& side, const Results& to, int parity) {
#if NEXT
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const Place at = place(side, parity, j);
        factors[j] = make_float2(0.0f, 0.0f);
        if (!at.valid()) continue;
#if NEXT == 2
        const float2 w = *reinterpret_cast<const float2*>(
            static_cast<const float*>(to.next_weight) + at.column());
        factors[j] = make_float2(to.next_offset + w.x, to.next_offset + w.y);
#else
        const u32 w =
            *reinterpret_cast<const u32*>(static_cast<const u16*>(to.next_weight) + at.column());
        factors[j] = make_float2(to.next_offset + bf16x2_low(w), to.next_offset + bf16x2_high(w));
#endif
    }
#endif
}

// The end of one strip (of a pair of strips, swiglu) for one of a lane's rows.
DEVICE float store_strip(const Results& to, const Place& place, int row, float2 sum, float2 up,
                         u32 residual, float2 factor) {
    if (!place.valid() || row >= to.rows) return 0.0f;
#if EPILOGUE == 3
    *reinterpret_cast<float2*>(reinterpret_cast<float*>(place.output) + place.at(row)) = sum;
    return 0.0f;
#else
#if EPILOGUE == 1
    sum = make_float2(silu(sum.x) * up.x, silu(sum.y) * up.y);
#elif EPILOGUE == 2
    sum = make_float2(bf16x2_low(residual) + sum.x, bf16x2_high(residual) + sum.y);
#endif
    const u32 pair = store_pair(place, row, sum.x, sum.y);
    const float low = bf16x2_low(pair), high = bf16x2_high(pair);
#if NEXT
    *reinterpret_cast<u32*>(to.y_normed + place.at(row)) =
        pack_bf16x2(low * factor.x, high * factor.y);
#endif
    return fma_rn(high, high, low * low);
#endif
}

typedef u32 Residual[ROW_TILES][2][4];

DEVICE void load_residual(Residual& residual, const Side& side, const Results& from, int parity) {
#if EPILOGUE == 2
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const Place at = place(side, parity, j);
#pragma unroll
        for (int i = 0; i < 2 * ROW_TILES; i++) {
            const int row = 8 * i + threadIdx.x % 32 / 4;
            residual[i / 2][i % 2][j] = 0;
            if (at.valid() && row < from.rows) {
                residual[i / 2][i % 2][j] =
                    load_shared_result(reinterpret_cast<const u32*>(from.residual + at.at(row)));
            }
        }
    }
#endif
}

DEVICE void store_own(Squares& squares, const Own& own, const Residual& residual,
                      const Factors& factors, const Side& side, const Results& to, int parity) {
    const int lane = threadIdx.x % 32;
    const float* scales = &side.scales[parity][threadIdx.x / 32 * 32 + lane % 4 * 2];
    constexpr int STRIPS = EPILOGUE == SWIGLU ? 2 : 1;  // that make one strip of rows
#pragma unroll
    for (int i = 0; i < 2 * ROW_TILES; i++) {
        const int m = i / 2, r = i % 2, row = 8 * i + lane / 4;
        const float factor = row_scale(side, to, row);
        squares[m][r] = 0.0f;
#pragma unroll
        for (int j = 0; j < 4; j += STRIPS) {
            float2 v[2];
#pragma unroll
            for (int s = 0; s < STRIPS; s++) {
                const float(&sum)[4] = own[m][j + s];
                const float* column = scales + 8 * (j + s);
                v[s] = make_float2(sum[2 * r] * column[0] * factor,
                                   sum[2 * r + 1] * column[1] * factor);
            }
            const u32 add = EPILOGUE == RESIDUAL ? residual[m][r][j] : 0;
            squares[m][r] +=
                store_strip(to, place(side, parity, j), row, v[0], v[STRIPS - 1], add, factors[j]);
        }
    }
}

// Sums of squares of 256 columns: lanes of a row, then warps, in order.
DEVICE void store_squares(const Squares& squares, Side& side, const Results& to, const Item& item) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    sync_block();  // another group of this block may just have ended
#pragma unroll
    for (int i = 0; i < 2 * ROW_TILES; i++) {
        float sum = squares[i / 2][i % 2];
        sum += shuffle_xor(sum, 1);
        sum += shuffle_xor(sum, 2);
        if (lane % 4 == 0) side.y_squares[warp][8 * i + lane / 4] = sum;
    }
    sync_block();
    if (threadIdx.x < MOST_ROWS) {
        float sum = 0.0f;
        if (threadIdx.x < ROWS) {
#pragma unroll
            for (int w = 0; w < WARPS; w++) sum += side.y_squares[w][threadIdx.x];
        }
        to.y_squares[item.column / GROUP_COLUMNS * MOST_ROWS + threadIdx.x] = sum;
    }
}

// What comes after the product, for a whole group.
DEVICE void end_group(const Own& own, const Item& item, Side& side, const Results& to, int parity) {
    Residual residual;
    Factors factors;
    Squares squares;
    load_residual(residual, side, to, parity);
    load_factors(factors, side, to, parity);
    store_own(squares, own, residual, factors, side, to, parity);
    if (to.y_squares) store_squares(squares, side, to, item);
}

// An item this block has left its part of: if it was the last to, the group is its to end.
DEVICE void end_if_last(Side& side, const Results& to, int parity) {
    const Item item = item_at(side.items[parity], 0);
    if (item.parts == 1 || !side.last[parity]) return;
    if (threadIdx.x == 0) to.arrivals[item.first] = 0;
    Own own;
    add_parts(own, to.partials + static_cast<u64>(item.first) * PART, item.parts);
    end_group(own, item, side, to, parity);
}

// The sums of item `at` are done. A group that is whole ends at once. A part is left behind and
// announced, by a thread that has no bulk copies under way, which a release would wait for; whether
// it was the last part shows an item later, when the answer is there, and the stream goes on
// meanwhile. `room`: where warps of a pair meet. Warps that have no n-tile in a narrow group go along
// with sums of zero.
DEVICE void finish(const Sums& sums, Side& side, const Results& to, float4* room, int at,
                   bool first) {
    const int parity = at & 1;
    copy_async_wait<0>();
    sync_block();
    const Item item = item_at(side.items[parity], 0);
    Own own;
    exchange(own, sums, room);
    if (item.parts == 1) {
        end_group(own, item, side, to, parity);
    } else {
        write_part(own, to.partials + static_cast<u64>(item.first + item.order) * PART);
        sync_block();
        if (threadIdx.x == 32 * WARPS - 1) {
            side.last[parity] = arrive(to.arrivals + item.first) == item.parts - 1;
        }
    }
    if (!first) {
        end_if_last(side, to, parity ^ 1);
        sync_block();  // what it read makes room for the next item's
    }
    if (!item.last) return;
    sync_block();
    end_if_last(side, to, parity);
}
