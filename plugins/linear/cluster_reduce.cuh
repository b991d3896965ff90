// The cluster reduce of split-K: adds the partial sums of a work tile's columns.
//
// Warps with the same columns first add up what they have over different slots of K, within their
// block, and share the result out among themselves (join). Each block finishes a share of the item's
// columns: all blocks of the cluster send their sums for these to its receive buffer. What crosses
// between multiprocessors takes so long that it is worth adding first. Nothing else is waited for,
// so that streaming goes on.
//
// Compile-time: see pipeline.cuh, epilogue_tiles.cuh.
#pragma once
#include "linear/epilogue_tiles.cuh"

// What a warp finishes of half an n-tile (4 strips of 8 columns) of a row tile.
typedef float OwnSums[OWN_STRIPS][4];
constexpr int STRIP_BYTES = 32 * 16;             // a warp's sums for a strip of a row tile
constexpr int WARP_STRIPS = ROW_TILES * STRIPS;  // of all row tiles
constexpr int HALF_BYTES = ROW_TILES * 4 * STRIP_BYTES;
// From its beginning on, sums [own half][block]; at its end, what warps hand over to one another: the
// more warps there are for an n-tile, the more of this, but the fewer halves.
constexpr int HALF_SUMS_BYTES = 2 * (PARTS > WARPS ? PARTS : WARPS) / SPLIT * HALF_BYTES;
DEVICE constexpr bool both_fit(int lanes) {
    const int halves = 2 * lanes > PARTS ? 2 * lanes : PARTS, groups = WARPS / lanes / SPLIT;
    const int handed_over = WARPS * (WARP_STRIPS - WARP_STRIPS / groups) * STRIP_BYTES;
    return halves * HALF_BYTES + handed_over <= HALF_SUMS_BYTES;
}
static_assert(both_fit(WARPS / 2), "see WorkTile::lanes");
static_assert(PAIRS || (both_fit(WARPS / 4) && (PARTS > 2 || both_fit(WARPS / 8))), "see WorkTile::lanes");
constexpr int JOIN_BARRIER = 1;  // the first of the numbers for sync_some

// An octet is eight rows of a narrow tile, which one warp finishes.
constexpr int OCTETS = 2 * ROW_TILES;
constexpr int OWN_OCTETS = OCTETS / 2;  // of each of the two blocks
constexpr int SENDERS = WARPS / SPLIT;  // warps of a block that have a part of an octet
// [own octet][block][sender]
constexpr int NARROW_SUMS_BYTES = NARROW * OWN_OCTETS * 2 * SENDERS * 32 * 16;
constexpr int PARTIALS_BYTES = HALF_SUMS_BYTES + NARROW_SUMS_BYTES;

// A value that depends on every load that went into the sums, for `received`.
DEVICE u32 last_of(const OwnSums& own) {
    u32 x = 0;
#pragma unroll
    for (int j = 0; j < OWN_STRIPS; j++) x ^= float_bits(own[j][0]);
    return x;
}

// Which of its strips a warp sends: those of its group among the `groups` warps with the same
// columns, each of which sends `each`, a power of two. All lie in the same half of an n-tile.
struct SentStrips {
    int group, groups, each;

    DEVICE SentStrips(const WorkTile& item, int group_)
        : group(group_), groups(item.groups()), each(WARP_STRIPS * SPLIT >> item.phase_bits()) {}
    DEVICE bool has(int strip) const { return (strip & -each) == group * each; }
    // The half's number in the item.
    DEVICE int half(const WarpTile& part) const {
        return 2 * part.tile + (SPLIT > 1 ? part.side : group * each / 4);
    }
};

// A block's receive buffer for partial sums, with the barriers of its senders and readers.
struct PartialSumBuffer {
    saddr buffer;   // of PARTIALS_BYTES
    saddr arrived;  // barrier: the sums have arrived
    saddr free;     // barrier: all blocks have read what came to their buffers

    // Of either barrier's phase of an item, and of the item before.
    DEVICE static u32 parity(int number) { return number & 1; }
    DEVICE static u32 parity_before(int number) { return parity(number) ^ 1; }

    // Halves of an item that a block finishes.
    DEVICE static int share(const WorkTile& item) { return max(1, 2 * item.lanes() / PARTS); }

    // Called by one thread of the block before any sums of the cluster's item `number` can arrive.
    DEVICE void expect(const WorkTile& item, int number, int rank) const {
        const int here = min(share(item), item.halves() - rank * share(item));
        const int narrow = item.narrow.there() ? NARROW_SUMS_BYTES : 0;
        const u32 bytes = max(0, here) * PARTS * HALF_BYTES + narrow;
        // With no bytes expected the phase ends at once. A warp of this block that has not yet seen
        // the end of the previous phase would then miss it and wait forever.
        if (MANY && bytes == 0) barrier_wait_cluster(free, parity_before(number));
        barrier_expect(arrived, bytes);
    }

    // Adds to the strips that this warp sends what the other warps with the same columns have of them.
    // All of those warps come here. In each round, a warp halves the strips that it has: it hands over
    // one half and adds to the other what it receives. So all strips are added up in the same way, and
    // equal columns have equal sums. Returns what `release` needs.
    DEVICE u32 join(Sums& sums, const WarpTile& part, const SentStrips& sent) const {
        const int warp = threadIdx.x / 32, each = (WARP_STRIPS - sent.each) * STRIP_BYTES;
        saddr own = buffer + HALF_SUMS_BYTES - (WARPS - warp) * each + threadIdx.x % 32 * 16;
        int kept = 0, count = WARP_STRIPS;  // the first of the strips, and how many
        u32 last = 0;
#pragma unroll 1
        for (int bit = sent.groups >> 1; bit > 0; bit >>= 1) {
            count >>= 1;
            const bool upper = sent.group & bit;
            const int handed = upper ? kept : kept + count;
            kept = upper ? kept + count : kept;
#pragma unroll
            for (int s = 0; s < WARP_STRIPS; s++) {
                if ((s & -count) != handed) continue;
                store_shared16(own + (s & count - 1) * STRIP_BYTES, sums[s / STRIPS][s % STRIPS]);
            }
            sync_some(JOIN_BARRIER + part.tile * SPLIT + part.side, 32 * sent.groups);
            const saddr from = own + ((sent.group ^ bit) - sent.group) * SPLIT * each;
#pragma unroll
            for (int s = 0; s < WARP_STRIPS; s++) {
                if ((s & -count) != kept) continue;
                const uint4 v = load_shared16(from + (s & count - 1) * STRIP_BYTES);
                add_to(sums[s / STRIPS][s % STRIPS], v);
                last ^= v.x;
            }
            own += count * STRIP_BYTES;
        }
        return last;
    }
    // Sends the warp's strips to the block that finishes them.
    DEVICE void send(const Sums& sums, const WorkTile& item, const WarpTile& part, const SentStrips& sent,
                     int rank) const {
        const int halves = share(item), half = sent.half(part);
        if (SPLIT == 1 && item.half && half % 2) return;  // half an n-tile has only one
        // `halves` is a power of two.
        const u32 owner = half / halves;
        const saddr at = buffer + ((half & halves - 1) * PARTS + rank) * HALF_BYTES;
        const u32 to = cluster_address(at + threadIdx.x % 32 * 16, owner);
        const u32 barrier = cluster_address(arrived, owner);
#pragma unroll
        for (int s = 0; s < WARP_STRIPS; s++) {
            if (!sent.has(s)) continue;
            const float(&v)[4] = sums[s / STRIPS][s % STRIPS];
            const int in_half = SPLIT > 1 ? s : s % 4;
            store_cluster16(to + in_half * STRIP_BYTES, make_float4(v[0], v[1], v[2], v[3]), barrier);
        }
    }
    // Both. With two groups, each has code of its own, in which it is known which strips these are.
    DEVICE u32 deliver(Sums& sums, const WorkTile& item, const WarpTile& part, int rank) const {
        const int group = part.phase / SPLIT;
        if (!PAIRS || SPLIT > 1) return deliver(sums, item, part, {item, group}, rank);
        if (group == 0) return deliver(sums, item, part, {item, 0}, rank);
        return deliver(sums, item, part, {item, 1}, rank);
    }
    DEVICE u32 deliver(Sums& sums, const WorkTile& item, const WarpTile& part, const SentStrips& sent,
                       int rank) const {
        const u32 last = join(sums, part, sent);
        send(sums, item, part, sent, rank);
        return last;
    }
    // Sends the warp's part of a narrow tile; a lane's 16 bytes are one row of two strips.
    DEVICE void send_narrow(const NarrowSums& narrow, int rank) const {
        const int warp = threadIdx.x / 32;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int octet = warp % SPLIT * 2 + i, owner = octet / OWN_OCTETS;
            const saddr at = narrow_at((octet % OWN_OCTETS * 2 + rank) * SENDERS + warp / SPLIT);
            store_cluster16(cluster_address(at, owner),
                            make_float4(narrow[0][2 * i], narrow[0][2 * i + 1], narrow[1][2 * i],
                                        narrow[1][2 * i + 1]),
                            cluster_address(arrived, owner));
        }
    }
    DEVICE saddr narrow_at(int place) const {
        return buffer + HALF_SUMS_BYTES + (place * 32 + threadIdx.x % 32) * 16;
    }
    // Adds the sums of an octet, in order of blocks and then of warps.
    DEVICE float4 add_narrow(int own) const {
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 4
        for (int p = 0; p < 2 * SENDERS; p++) {
            add_to(sum, load_shared16(narrow_at(own * 2 * SENDERS + p)));
        }
        return make_float4(sum[0], sum[1], sum[2], sum[3]);
    }

    // Adds the sums of this warp's share of a half, in order of blocks.
    DEVICE void add(OwnSums& own) const {
        const saddr from = buffer + own_half() * PARTS * HALF_BYTES +
                           (own_row_tile() * 4 + own_strip(0)) * STRIP_BYTES +
                           (4 * own_row() + threadIdx.x % 4) * 16;
#pragma unroll
        for (int j = 0; j < OWN_STRIPS; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) own[j][i] = 0.0f;
        }
        constexpr int AHEAD = 8 / OWN_STRIPS;
#pragma unroll AHEAD
        for (int p = 0; p < PARTS; p++) {
#pragma unroll
            for (int j = 0; j < OWN_STRIPS; j++) {
                add_to(own[j], load_shared16(from + p * HALF_BYTES + j * SHARERS * STRIP_BYTES));
            }
        }
    }

    // This warp has read what it has to read of the item: what was handed over to it, and the sums that
    // it finishes. The buffers may be written again once all warps of all blocks have arrived: also
    // those without a part of the item, since until they have seen the end of the phase before, the
    // next phase must not end.
    static constexpr int READERS = PARTS * WARPS;
    DEVICE void release(u32 last) const {
        received(last);
        sync_warp();
        const int lane = threadIdx.x % 32;
        if (lane < PARTS) barrier_arrive_cluster(cluster_address(free, lane));
    }

    DEVICE static void add_to(float (&sum)[4], const uint4& v) {
        sum[0] += bits_float(v.x), sum[1] += bits_float(v.y);
        sum[2] += bits_float(v.z), sum[3] += bits_float(v.w);
    }
};
