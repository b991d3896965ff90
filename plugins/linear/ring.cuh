// One warp's stream of weights: slots of shared memory that the copy engine fills in the order in
// which the warp will read them, across the items of its block.
//
// Compile-time: KINDS, the kinds of weight that occur (1 << kind); STAGES, slots of a warp.
#pragma once
#include "linear/units.cuh"

constexpr int WARPS = 8;
constexpr bool ONLY_NVFP4 = KINDS == 1 << NVFP4;
constexpr int RING_BYTES = STAGES * NVFP4_SLOT;  // of one warp

// A piece of one group that one block makes: steps k0..k1 of K.
struct Item {
    u32 offset;  // of the group in the packed weight, 512 bytes
    int k0, k1;
    int kind, tiles;
    int column;  // first packed column
    int first, order, parts;  // partial sums of this group: first of all, which is ours, how many
};

constexpr int ITEM_WORDS = 2;  // int4

DEVICE Item item_at(const int4* items, int i) {
    const int4 a = items[ITEM_WORDS * i], b = items[ITEM_WORDS * i + 1];
    return {static_cast<u32>(a.x), a.y, a.z, a.w & 255, a.w >> 8, b.x, b.y, b.z, b.w};
}

struct Ring {
    // Where the next slot's bytes come from.
    const u8* packed;
    const int4* items;
    int item, last;        // next item to open, and the end
    const u8* from;
    int left;              // slots of the open item
    int burst, in_burst;   // slots that follow each other, and those left of them
    u32 bytes, jump;       // of a slot; over the other warps' slots
    // Where the slots are.
    saddr slot, full, end;
    u32 parity;

    DEVICE void open() {
        left = 0;
        while (left == 0 && item < last) {
            const Item it = item_at(items, item++);
            const int warp = threadIdx.x / 32;
            if (warp >= 2 * it.tiles) continue;
            const int kind = ONLY_NVFP4 ? NVFP4 : it.kind;
            burst = in_burst = slots_of(kind);
            bytes = slot_bytes(kind);
            const u32 step = it.tiles * step_bytes(kind);
            jump = step - (burst - 1) * bytes;
            from = packed + static_cast<u64>(it.offset) * 512 + static_cast<u64>(it.k0) * step +
                   warp * burst * bytes;
            left = (it.k1 - it.k0) * burst;
        }
    }

    // Ask for the next slot's bytes, if there are any, into the slot that is free.
    DEVICE void request() {
        if (left == 0) return;
        if (threadIdx.x % 32 == 0) {
            const u32 size = ONLY_NVFP4 ? NVFP4_SLOT : bytes;
            barrier_expect(full, size);
            copy_bulk(slot, from, size, full);
        }
        if (ONLY_NVFP4 || --in_burst == 0) {
            from += jump;
            in_burst = burst;
        } else {
            from += bytes;
        }
        if (--left == 0) open();
    }

    DEVICE void advance() {
        slot += NVFP4_SLOT;
        full += 8;
        if (slot == end) {
            slot -= RING_BYTES;
            full -= 8 * STAGES;
            parity ^= 1;
        }
    }

    DEVICE void start(saddr ring, saddr barriers) {
        slot = ring + threadIdx.x / 32 * RING_BYTES;
        end = slot + RING_BYTES;
        full = barriers + threadIdx.x / 32 * 8 * STAGES;
        parity = 0;
        if (threadIdx.x % 32 == 0) {
#pragma unroll
            for (int i = 0; i < STAGES; i++) barrier_init(full + 8 * i, 1);
            barrier_init_done();
        }
        sync_warp();
        open();
#pragma unroll 1
        for (int i = 0; i < STAGES; i++) {
            request();
            advance();
        }
        parity = 0;
    }

    DEVICE void wait() const { barrier_wait(full, parity); }
    // Every lane has read the slot.
    DEVICE void next() {
        sync_warp();
        request();
        advance();
    }
};
