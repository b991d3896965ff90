// From an item's sums to output rows: adds the partial sums that the warps and blocks of a cluster
// made over different ranges of K, in a fixed order, then runs the epilogue.
//
// Each block finishes a share of the item's columns. All warps of the cluster send their sums for
// these columns to its receive buffer (Room). Nothing else is waited for, so that streaming goes
// on.
//
// Compile-time: EPILOGUE 0 none, 1 swiglu, 2 residual, 3 float32 logits; ROW_SCALE, whether the
// sums of a row are multiplied by its 1 / rms; NEXT, what is written to slabs for the next product:
// 0 nothing; 1 or 2 the rows times (offset + weight) of the next norm, whose weight is bf16 or
// float32; 3 the rows.
#pragma once
#include "linear/ends.cuh"

constexpr int MOST_ROWS = 32;
constexpr int SQUARES_COLUMNS = 32;

// What a warp finishes of half an n-tile (4 strips of 8 columns) of a row tile.
typedef float Own[OWN_STRIPS][4];
constexpr int HALF_SUMS = ROW_TILES * 4 * 32;           // float4
// [own half][block][group], at most
constexpr int PLACES = 2 * (PARTS > WARPS ? PARTS : WARPS) / SPLIT;
constexpr int HALVES_ROOM = PLACES * HALF_SUMS * 16;
constexpr int MOST_HALVES = 8;                           // of an item

// An octet is eight rows of a narrow tile, which one warp finishes.
constexpr int OCTETS = 2 * ROW_TILES;
constexpr int OWN_OCTETS = OCTETS / 2;  // of each of the two blocks
constexpr int SENDERS = WARPS / SPLIT;  // warps of a block that have a part of an octet
// [own octet][block][sender]
constexpr int NARROW_ROOM = NARROW * OWN_OCTETS * 2 * SENDERS * 32 * 16;
constexpr int ROOM_BYTES = HALVES_ROOM + NARROW_ROOM;
static_assert(!NARROW || EPILOGUE == SWIGLU, "nobody wants squares of a narrow tile");

// A value that depends on every load that went into the sums, for `received`.
DEVICE u32 last_of(const Own& own) {
    u32 x = 0;
#pragma unroll
    for (int j = 0; j < OWN_STRIPS; j++) x ^= float_bits(own[j][0]);
    return x;
}

// What this warp finishes: the row tile, which of the block's halves, the first of its strips.
DEVICE int own_row_tile() { return threadIdx.x / 32 % ROW_TILES; }
DEVICE int own_half() { return threadIdx.x / 32 / ROW_TILES / SHARERS; }
DEVICE int first_strip() { return threadIdx.x / 32 / ROW_TILES % SHARERS * OWN_STRIPS; }
// Synchronises the warps that share a half of a row tile.
DEVICE void meet() { sync_some(1 + own_half() * ROW_TILES + own_row_tile(), 32 * SHARERS); }

// A block's receive buffer for sums, with the barriers that hand it over between sender and reader.
struct Room {
    saddr sums;     // the buffer
    saddr arrived;  // barrier: the sums have arrived
    saddr free;     // barrier: all blocks have read their sums
    u32 parity;

    // Halves of an item that a block finishes.
    DEVICE static int share(const Item& item) { return max(1, 2 * item.lanes() / PARTS); }

    // Called by one thread of the block before any sums of the item can arrive.
    DEVICE void expect(const Item& item, int rank) const {
        const int here = min(share(item), item.halves() - rank * share(item));
        const int narrow = item.narrow.there() ? NARROW_ROOM : 0;
        const u32 bytes = max(0, here) * PARTS * item.groups() * HALF_SUMS * 16 + narrow;
        // With no bytes expected the phase ends at once. A warp of this block that has not yet seen
        // the end of the previous phase would then miss it and wait forever.
        if (MANY && bytes == 0) barrier_wait_cluster(free, parity ^ 1);
        barrier_expect(arrived, bytes);
    }

    // Sends this warp's sums to the blocks that finish them.
    DEVICE void send(const Sums& sums, const Item& item, int rank) const {
        const Part part(item, threadIdx.x / 32);
        const int groups = item.groups(), halves = share(item);
#pragma unroll
        for (int h = 0; h < 2 / SPLIT; h++) {
            // `halves` is a power of two.
            const int half = 2 * part.tile + part.side + h, own = half & halves - 1;
            if (h == 1 && item.half) break;
            const int place = (own * PARTS + rank) * groups + part.phase / SPLIT;
            const u32 owner = half / halves;
            const u32 to = cluster_address(sums_at(place), owner);
            const u32 barrier = cluster_address(arrived, owner);
#pragma unroll
            for (int m = 0; m < ROW_TILES; m++) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const float(&v)[4] = sums[m][4 * h + j];
                    store_cluster16(to + (m * 4 + j) * 32 * 16,
                                    make_float4(v[0], v[1], v[2], v[3]), barrier);
                }
            }
        }
    }
    // The same for the warp's part of a narrow tile; a lane's 16 bytes are one row of two strips.
    DEVICE void send_narrow(const NarrowSums& sums, int rank) const {
        const int warp = threadIdx.x / 32;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int octet = warp % SPLIT * 2 + i, owner = octet / OWN_OCTETS;
            const saddr at = narrow_at((octet % OWN_OCTETS * 2 + rank) * SENDERS + warp / SPLIT);
            store_cluster16(cluster_address(at, owner),
                            make_float4(sums[0][2 * i], sums[0][2 * i + 1], sums[1][2 * i],
                                        sums[1][2 * i + 1]),
                            cluster_address(arrived, owner));
        }
    }
    DEVICE saddr narrow_at(int place) const {
        return sums + HALVES_ROOM + (place * 32 + threadIdx.x % 32) * 16;
    }
    // Adds the sums of an octet, in order of blocks and then of warps.
    DEVICE float4 add_narrow(int own) const {
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
        for (int p = 0; p < 2 * SENDERS; p++) {
            const uint4 v = load_shared16(narrow_at(own * 2 * SENDERS + p));
            sum.x += bits_float(v.x);
            sum.y += bits_float(v.y);
            sum.z += bits_float(v.z);
            sum.w += bits_float(v.w);
        }
        return sum;
    }

    DEVICE saddr sums_at(int place) const {
        return sums + (place * HALF_SUMS + threadIdx.x % 32) * 16;
    }

    // Adds the sums of this warp's strips, in order of blocks and then of groups.
    DEVICE void add(Own& own, int groups) const {
        const int strip = own_row_tile() * 4 + first_strip();
        const saddr from = sums_at(own_half() * PARTS * groups) + strip * 32 * 16;
#pragma unroll
        for (int j = 0; j < OWN_STRIPS; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) own[j][i] = 0.0f;
        }
        constexpr int AHEAD = 8 / OWN_STRIPS;
#pragma unroll AHEAD
        for (int p = 0; p < PARTS * groups; p++) {
#pragma unroll
            for (int j = 0; j < OWN_STRIPS; j++) {
                const uint4 v = load_shared16(from + (p * HALF_SUMS + j * 32) * 16);
                own[j][0] += bits_float(v.x);
                own[j][1] += bits_float(v.y);
                own[j][2] += bits_float(v.z);
                own[j][3] += bits_float(v.w);
            }
        }
    }

    // This warp has read its sums. Blocks may send again once all sums have been read. The barrier
    // counts the largest possible item; one warp (`first`) also arrives for the parts that this
    // item does not have, except for those that each block's idle warps arrive for.
    DEVICE void release(const Item& item, bool first, u32 last) const {
        const int narrow = NARROW && !item.narrow.there() ? OCTETS : 0;
        const int halves = (MOST_HALVES - item.halves()) * ROW_TILES * SHARERS;
        const int missing = halves + narrow - item.idle();
        release(first ? 1 + missing : 1, last);
    }
    // The same for a warp that has no part of the item: until it has seen the end of the phase
    // before, the next phase must not end.
    DEVICE void release_idle() const {
        sync_warp();
        if (threadIdx.x % 32 == 0) barrier_arrive(free);
    }
    DEVICE void release(int times, u32 last) const {
        received(last);
        sync_warp();
        const int lane = threadIdx.x % 32;
        if (lane >= PARTS) return;
        barrier_arrive_cluster(cluster_address(free, lane), times);
    }
};

// For a lane's rows 8 i + lane / 4 of a row tile: the sums of squares of the values that it stored.
typedef float Squares[2];

DEVICE float scale_of(const Results& to, int row) {
    return bits_float(load_shared4(to.row_scales + 4 * row));
}

DEVICE float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// Computes 1 / rms of each row from sums of squares [chunks, 32]. Called by one warp; each lane
// adds four rows over some of the chunks.
DEVICE void row_scales(float* scales, const float* squares, float eps) {
    constexpr int ROW_LANES = ROWS / 4, STEP = 32 / ROW_LANES, AT_ONCE = 10;
    constexpr int chunks = (K_SIZE + SQUARES_COLUMNS - 1) / SQUARES_COLUMNS;
    const int lane = threadIdx.x % 32;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
    for (int first = lane / ROW_LANES; first < chunks; first += AT_ONCE * STEP) {
        float4 v[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int c = first + i * STEP;
            v[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (c < chunks) {
                v[i] = load_shared_result(reinterpret_cast<const float4*>(
                    squares + c * MOST_ROWS + lane % ROW_LANES * 4));
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            sum = make_float4(sum.x + v[i].x, sum.y + v[i].y, sum.z + v[i].z, sum.w + v[i].w);
        }
    }
#pragma unroll
    for (int mask = ROW_LANES; mask < 32; mask *= 2) {
        sum.x += shuffle_xor(sum.x, mask);
        sum.y += shuffle_xor(sum.y, mask);
        sum.z += shuffle_xor(sum.z, mask);
        sum.w += shuffle_xor(sum.w, mask);
    }
    if (lane >= ROW_LANES) return;
    constexpr float part = 1.0f / K_SIZE;
    *reinterpret_cast<float4*>(scales + 4 * lane) =
        make_float4(rsqrtf(sum.x * part + eps), rsqrtf(sum.y * part + eps),
                    rsqrtf(sum.z * part + eps), rsqrtf(sum.w * part + eps));
}

// The epilogue of one strip (swiglu: a pair of strips) for one of a lane's rows. Returns the sum of
// squares of the two stored values.
DEVICE float store_strip(const Results& to, const Place& place, int row, float2 sum, float2 up,
                         u32 residual, Raw raw) {
    if (!place.valid() || row >= to.rows) return 0.0f;
    const int at = place.at(row);
#if EPILOGUE == 3
    *reinterpret_cast<float2*>(reinterpret_cast<float*>(place.output) + at) = sum;
    return 0.0f;
#else
#if EPILOGUE == 1
    sum = make_float2(silu(sum.x) * up.x, silu(sum.y) * up.y);
#elif EPILOGUE == 2
    sum = make_float2(bf16x2_low(residual) + sum.x, bf16x2_high(residual) + sum.y);
#endif
    const u32 pair = pack_bf16x2(sum.x, sum.y);
    *reinterpret_cast<u32*>(reinterpret_cast<u16*>(place.output) + at) = pair;
    const float low = bf16x2_low(pair), high = bf16x2_high(pair);
#if NEXT
    const int column = place.column();
    u16* const slab = to.y_slabs + slab_offset(to.rows, row, column) + column % 8;
#endif
#if NEXT == 3
    *reinterpret_cast<u32*>(slab) = pair;
#elif NEXT
    const float2 factor = factor_of(to, raw);
    *reinterpret_cast<u32*>(slab) = pack_bf16x2(low * factor.x, high * factor.y);
#endif
    return fma_rn(high, high, low * low);
#endif
}

DEVICE void store_own(Squares& squares, const Own& own, const End& end, const Results& to, int m) {
    constexpr int STRIDE = EPILOGUE == SWIGLU ? 2 : 1;  // input strips per output strip
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = 16 * m + 8 * i + threadIdx.x % 32 / 4;
        const float factor = ROW_SCALE ? scale_of(to, row) : 1.0f;
        squares[i] = 0.0f;
#pragma unroll
        for (int j = 0; j < OWN_STRIPS; j += STRIDE) {
            float2 v[2];
#pragma unroll
            for (int s = 0; s < STRIDE; s++) {
                const float(&sum)[4] = own[j + s];
                const float2 scale = end.scales[j + s];
                v[s] = make_float2(sum[2 * i] * scale.x * factor, sum[2 * i + 1] * scale.y * factor);
            }
            const u32 add = EPILOGUE == RESIDUAL ? end.residual[i][j] : 0;
            squares[i] +=
                store_strip(to, end.places[j], row, v[0], v[STRIDE - 1], add, end.factors[j]);
        }
    }
}

// Stores each row's sum of squares over 32 columns, added in a fixed order: over a warp's lanes,
// then over the warps that share the columns, through their staging areas, which are used up.
// `again`: whether the next item's data will come there.
DEVICE void store_squares(Squares& squares, const Results& to, int column, int m, bool padding,
                          bool again) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float* const area = reinterpret_cast<float*>(to.areas + warp * STAGED_BYTES);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        squares[i] += shuffle_xor(squares[i], 1);
        squares[i] += shuffle_xor(squares[i], 2);
    }
    if (SHARERS > 1) {
        sync_warp();  // all lanes have read the area
        if (lane % 4 == 0) {
            area[lane / 4] = squares[0];
            area[8 + lane / 4] = squares[1];
        }
        meet();
    }
    if (first_strip() == 0 && !padding) {
        float* const at = to.y_squares + column / SQUARES_COLUMNS * MOST_ROWS + 16 * m;
        if (SHARERS == 1) {
            if (lane % 4 == 0) at[lane / 4] = squares[0], at[8 + lane / 4] = squares[1];
        } else if (lane < 16) {
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < SHARERS; w++) {
                sum += area[w * ROW_TILES * STAGED_BYTES / 4 + lane];
            }
            at[lane] = sum;
            if (again) received(float_bits(sum));
        }
        if (ROW_TILES == 1 && lane < 16) at[16 + lane] = 0.0f;
    }
    if (SHARERS > 1 && again) meet();
}

// Finishes eight rows of a narrow tile: one strip of gate and one of up.
DEVICE void finish_narrow(const Room& room, saddr scales_made, const Results& to, const Item& item,
                          saddr staged, int octet, u32 parity) {
    const int lane = threadIdx.x % 32, row = 8 * octet + lane / 4;
    wait_staged();
    const float2 gate = pair_at(staged + 8 * (lane % 4)), up = pair_at(staged + 8 * (4 + lane % 4));
    Place place;
    place.strip = strip_at(staged + STAGED_STRIPS);
    place.output = to.outputs[0];
    if (ROW_SCALE) barrier_wait(scales_made, 0);
    barrier_wait_cluster(room.arrived, parity);
    const float4 sum = room.add_narrow(octet % OWN_OCTETS);
    if (item.left) {
        room.release(1, float_bits(sum.x) ^ float_bits(gate.x) ^ float_bits(up.x) ^ place.strip.x);
    }
    const float factor = ROW_SCALE ? scale_of(to, row) : 1.0f;
    store_strip(to, place, row, make_float2(sum.x * gate.x * factor, sum.y * gate.y * factor),
                make_float2(sum.z * up.x * factor, sum.w * up.y * factor), 0, Raw{});
}

// What a warp finishes of an item: half an n-tile of a row tile, eight rows of a narrow tile, both
// or neither.
struct Share {
    int half, octet;  // below 0: none

    DEVICE Share(const Item& item, int rank) {
        const int warp = threadIdx.x / 32, halves = Room::share(item), own = own_half();
        half = own < halves && rank * halves + own < item.halves() ? rank * halves + own : -1;
        // If there are warps that finish no half, they take the octets.
        const int first = ROW_TILES > 1 ? 0 : halves;
        const bool narrow = item.narrow.there() && warp >= first && warp < first + OWN_OCTETS;
        octet = narrow ? rank * OWN_OCTETS + warp - first : -1;
    }
    DEVICE int column(const Item& item) const { return item.column + half * SQUARES_COLUMNS; }
    // Offset of a narrow tile's staged data: the warp's own area if it finishes no half, else an
    // area behind those of all warps.
    DEVICE static int narrow_at() { return ROW_TILES > 1 ? WARPS * STAGED_BYTES : 0; }
    DEVICE void stage(saddr to, const Results& from, const Item& item) const {
        if (half >= 0) stage_end(to, from, column(item), HALF_TILE);
        if (octet >= 0) stage_end(to + narrow_at(), from, item.narrow.column, HALF_TILE / 2);
    }
};

// Finishes an item after its last product. `staged`: the data that this warp's share needs.
DEVICE void finish(const Sums& sums, const NarrowSums& narrow_sums, Room& room, saddr scales_made,
                   const Results& to, const Item& item, saddr staged, int rank, bool first) {
    const Share share(item, rank);
    const u32 parity = room.parity;
    room.parity ^= 1;
    // Warps with nothing to send wait too: otherwise they could get two phases ahead and miss one.
    // For the first item the wait would succeed at once, but still take time.
    if (MANY && !first) barrier_wait_cluster(room.free, parity ^ 1);
    if (Part(item, threadIdx.x / 32).of(item)) {
        room.send(sums, item, rank);
    } else if (MANY && item.left) {
        room.release_idle();
    }
    if (item.narrow.there()) room.send_narrow(narrow_sums, rank);
    if (share.octet >= 0) {
        finish_narrow(room, scales_made, to, item, staged + Share::narrow_at(), share.octet, parity);
    }
    if (share.half < 0) return;
    const int column = share.column(item), m = own_row_tile();
    End end;
    wait_staged();
    load_end(end, to, staged, m, first_strip());
    if (ROW_SCALE) barrier_wait(scales_made, 0);
    barrier_wait_cluster(room.arrived, parity);
    Own own;
    room.add(own, item.groups());
    if (item.left) {
        const bool one = share.half == 0 && m == 0 && first_strip() == 0;
        room.release(item, one, end.last() ^ last_of(own));
    }
    Squares squares;
    store_own(squares, own, end, to, m);
    const bool padding = end.places[0].strip.x < 0;
    if (to.y_squares) store_squares(squares, to, column, m, padding, item.left > 0);
}
