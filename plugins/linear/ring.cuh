// What a block streams: each warp its own weights, and all warps the rows they meet. Both come by
// the copy engine into slots of shared memory, in the order in which they are read, across the
// items of the block; weights are asked for before the kernel before this one has ended.
//
// Compile-time: KINDS, the kinds of weight that occur (1 << kind); ROW_TILES, row tiles of 16.
#pragma once
#include "linear/units.cuh"

constexpr int WARPS = 8;
constexpr int ROWS = 16 * ROW_TILES;
constexpr bool ONLY_NVFP4 = KINDS == 1 << NVFP4;

// Weights: a slot holds half a step of K of an n-tile (less where weights are wider). Even steps of
// an item go to one warp of a pair, odd steps to the other.
constexpr int SLOT = NVFP4_SLOT;
constexpr int SLOTS = 4;
constexpr int RING_BYTES = SLOTS * SLOT;  // of one warp

// Rows: a chunk is two steps of K of every row. A row is padded by 16 bytes, so that load_matrix4
// meets no bank twice.
constexpr int CHUNK = 2 * STEP_K;
constexpr int PITCH = 2 * CHUNK + 16;
constexpr int CHUNK_BYTES = ROWS * PITCH;
constexpr int CHUNKS = 3;

// A piece of one group that one block makes: steps k0..k1 of K.
struct Item {
    u32 offset;  // of the group in the packed weight, 512 bytes
    int k0, k1;
    int kind, tiles;
    bool last;   // of the block
    int column;  // first packed column
    int first, order, parts;  // partial sums of this group: first of all, which is ours, how many
};

constexpr int ITEM_WORDS = 2;  // int4

DEVICE Item item_at(const int4* items, int i) {
    const int4 a = items[ITEM_WORDS * i], b = items[ITEM_WORDS * i + 1];
    return {static_cast<u32>(a.x), a.y, a.z, a.w & 255, a.w >> 8 & 255, (a.w >> 16) != 0,
            b.x, b.y, b.z, b.w};
}

// Slots of one n-tile's step.
DEVICE constexpr int parts_of(int kind) { return 2 * slots_of(kind); }

// One warp's weights.
struct Weights {
    const u8* packed;
    const int4* items;
    int item;             // next to open; -1 after the last
    const u8* from;       // where the next slot's bytes come from
    int left;             // slots of the open item
    int burst, in_burst;  // slots that follow each other, and those left of them
    u32 bytes, jump;      // of a slot; from the last of a step to the first of the step after next
    saddr slots, full;    // of this warp
    u32 slot, parity;     // the slot in turn, to be read or to be filled

    DEVICE void open() {
        left = 0;
        while (left == 0 && item >= 0) {
            const Item it = item_at(items, item);
            item = it.last ? -1 : item + 1;
            const int warp = threadIdx.x / 32, tile = warp / 2, odd = warp & 1;
            if (tile >= it.tiles) continue;
            const int kind = ONLY_NVFP4 ? NVFP4 : it.kind;
            burst = in_burst = parts_of(kind);
            bytes = slot_bytes(kind);
            const u32 own = burst * bytes, step = it.tiles * own;
            jump = 2 * step - own + bytes;
            from = packed + static_cast<u64>(it.offset) * 512 +
                   static_cast<u64>(it.k0 + odd) * step + tile * own;
            left = (it.k1 - it.k0 + 1 - odd) / 2 * burst;
        }
    }

    // Ask for the next slot's bytes, if there are any, into the slot in turn; then on to the next.
    DEVICE void request() {
        if (left != 0) {
            if (threadIdx.x % 32 == 0) {
                const u32 size = ONLY_NVFP4 ? SLOT : bytes;
                barrier_expect(full + 8 * slot, size);
                copy_bulk(slots + slot * SLOT, from, size, full + 8 * slot);
            }
            if (--in_burst == 0) {
                from += jump;
                in_burst = burst;
            } else {
                from += bytes;
            }
            if (--left == 0) open();
        }
        slot = (slot + 1) % SLOTS;
        parity ^= slot == 0;
    }

    DEVICE void start(saddr ring, saddr barriers) {
        const int warp = threadIdx.x / 32;
        slots = ring + warp * RING_BYTES;
        full = barriers + warp * 8 * SLOTS;
        slot = parity = 0;
        if (threadIdx.x % 32 == 0) {
#pragma unroll
            for (int i = 0; i < SLOTS; i++) barrier_init(full + 8 * i, 1);
            barrier_init_done();
        }
        sync_warp();
        open();
#pragma unroll
        for (int i = 0; i < SLOTS; i++) request();
        parity = 0;
    }

    // The slot in turn, its bytes there.
    DEVICE saddr wait() const {
        barrier_wait(full + 8 * slot, parity);
        return slots + slot * SLOT;
    }
    // Every lane has read it.
    DEVICE void next() {
        sync_warp();
        request();
    }
};

// The rows, seen alike by every warp. Chunk n is asked for by warp n % WARPS, two chunks ahead.
struct Rows {
    const u16* x;
    const int4* items;
    int count, k;          // rows there are; elements of one
    int item;              // of the chunk asked for next; -1 after the last
    int step, end;         // where it starts, and the item's end
    int asked, read;       // chunks so far
    saddr chunks, full, empty;

    DEVICE void open() {
        if (item < 0) return;
        const Item it = item_at(items, item);
        item = it.last ? -1 : item + 1;
        step = it.k0;
        end = it.k1;
    }

    DEVICE void ask() {
        if (step >= end) return;
        if (threadIdx.x / 32 == asked % WARPS) fetch();
        asked++;
        step += 2;
        if (step >= end) open();
    }

    DEVICE void fetch() const {
        const int lane = threadIdx.x % 32, turn = asked / CHUNKS;
        const u32 slot = asked % CHUNKS;
        if (turn > 0) barrier_wait(empty + 8 * slot, (turn - 1) & 1);
        const int first = step * STEP_K;
        const int columns = min(min(CHUNK, (end - step) * STEP_K), k - first);
        const u32 size = columns > 0 ? 2 * columns : 0;
        if (lane == 0) barrier_expect(full + 8 * slot, size * count);
        sync_warp();
        if (lane < count && size) {
            copy_bulk_kept(chunks + slot * CHUNK_BYTES + lane * PITCH,
                           x + static_cast<i64>(lane) * k + first, size, full + 8 * slot);
        }
    }

    // Barriers, and zeros where no row will ever be.
    DEVICE void start(u8* memory, saddr barriers) {
        chunks = shared_address(memory);
        full = barriers;
        empty = barriers + 8 * CHUNKS;
        for (int i = threadIdx.x; i < CHUNKS * CHUNK_BYTES / 16; i += 32 * WARPS) {
            reinterpret_cast<uint4*>(memory)[i] = make_uint4(0, 0, 0, 0);
        }
        if (threadIdx.x == 0) {
#pragma unroll
            for (int i = 0; i < CHUNKS; i++) {
                barrier_init(full + 8 * i, 1);
                barrier_init(empty + 8 * i, WARPS);
            }
        }
        barrier_init_done();
        asked = read = step = end = 0;
        open();
    }

    DEVICE saddr wait() const {
        const u32 slot = read % CHUNKS;
        barrier_wait(full + 8 * slot, read / CHUNKS & 1);
        return chunks + slot * CHUNK_BYTES;
    }
    DEVICE void next() {
        sync_warp();
        if (threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * (read % CHUNKS));
        read++;
    }
};
