// The mainloop of a consumer warp: waits for a stage, multiplies its slots, releases the stage.
//
// Compile-time: see pipeline.cuh.
#pragma once
#include "linear/head_norm.cuh"

// A consumer warp's mainloop over one work tile. In each stage, its slots start at `part.phase`.
struct Mainloop {
    PipelineState& state;
    u32 slot_at, row_at;  // offsets in a stage: of the warp's first slot, of the lane's row
    int end, phases;
    WarpTile part;

    DEVICE saddr slot() const { return state.bytes() + slot_at; }
    DEVICE saddr slab(int i) const { return state.bytes() + row_at + i * ROWS * SLAB_ROW; }
    DEVICE void wait() const { barrier_wait(state.filled(), state.parity); }
    // This lane has read the stage; `last` is derived from its last loads. Every lane arrives for
    // itself: this costs nothing measurable, and racecheck does not understand one lane that
    // arrives for others.
    DEVICE void next(u32 last) const {
        received(last);
        barrier_arrive(state.read());
        state.next();
    }

    // Goes through the remaining stages, in which the warp has no slot. `q`, here and below: the
    // number of a stage's first slot.
    DEVICE void skip(int q) const {
#pragma unroll 1
        for (; q < end; q += phases) {
            wait();
            next(0);
        }
    }

    // The warp's part of the narrow slot that goes with its own slot `i` of a stage: 16 of K of one
    // row tile.
    DEVICE static int narrow_k16() { return threadIdx.x / 64; }
    DEVICE void load_narrow(Narrow& narrow, int i) const {
        narrow.load(state.bytes() + NARROW_AT + (part.phase + i) * NARROW_SLOT,
                    slab(part.phase + i) + part.side * 16 * SLAB_ROW, narrow_k16());
    }
    DEVICE void only_narrow(NarrowSums& sums, int q) const {
#pragma unroll 1
        for (; q + part.phase < end; q += phases) {
            wait();
#pragma unroll 1
            for (int i = 0; i < SPLIT && q + part.phase + i < end; i++) {
                Narrow narrow;
                load_narrow(narrow, i);
                received(narrow.last());
                narrow.add(sums, narrow_k16());
            }
            next(0);
        }
        skip(q);
    }

    // Waits for a stage and points `at` and `rows` to the warp's first slot in it and its rows.
    DEVICE void enter(saddr& at, saddr& rows) const {
        wait();
        at = slot();
        rows = slab(part.phase);
    }
    // Adds the products of the first three quarters (16 of K each) of a slot and loads the fourth.
    DEVICE void three(Nvfp4& now, Nvfp4& ahead, Sums& sums, saddr at, saddr rows) const {
#pragma unroll
        for (int k16 = 0; k16 < 3; k16++) {
            ahead.load(at, rows, k16 + 1, part.side);
            now.add(sums, k16);
            now.follow(ahead);
        }
    }
    // Adds the fourth quarter after issuing the loads of the next slot's first (`at`, `rows`).
    DEVICE void fourth(Nvfp4& now, Nvfp4& ahead, Sums& sums, saddr at, saddr rows) const {
        ahead.load_scales(at);
        ahead.load(at, rows, 0, part.side);
        now.add(sums, 3);
        now = ahead;
    }
    // NVFP4: slot i of a stage is multiplied with slab i of the stage.
    DEVICE void nvfp4(Sums& sums, int q, Heads& heads) const {
        Nvfp4 now, ahead;
        saddr at, rows;
        enter(at, rows);
        now.load_scales(at);
        now.load(at, rows, 0, part.side);
#pragma unroll 1
        for (;;) {
            int left = min(SPLIT, end - q - part.phase);
#pragma unroll 1
            for (;;) {
                three(now, ahead, sums, at, rows);
                if (SPLIT == 1 || --left == 0) break;
                at += SLOT;
                rows += ROWS * SLAB_ROW;
                fourth(now, ahead, sums, at, rows);
            }
            next(now.last());
            q += phases;
            if (q + part.phase >= end) break;
            enter(at, rows);
            fourth(now, ahead, sums, at, rows);
            if (HEAD_SCALE) heads.pass(sums);
        }
        now.add(sums, 3);
        if (HEAD_SCALE) heads.end(sums);
        skip(q);
    }
    // The same in a kernel with narrow tiles, for an item with or without one.
    template <bool WITH_NARROW>
    DEVICE void nvfp4_narrow(Sums& sums, NarrowSums& narrow_sums, int q) const {
        Nvfp4 now, ahead;
        Narrow narrow;
        saddr at, rows;
        enter(at, rows);
        now.load_scales(at);
        now.load(at, rows, 0, part.side);
#pragma unroll 1
        for (;;) {
            const int count = min(SPLIT, end - q - part.phase);
#pragma unroll 1
            for (int i = 0;; i++) {
                three(now, ahead, sums, at, rows);
                if (WITH_NARROW) {
                    load_narrow(narrow, i);
                    if (SPLIT > 1) received(now.last());
                    narrow.add(narrow_sums, narrow_k16());
                }
                if (SPLIT == 1 || i == count - 1) break;
                at += SLOT;
                rows += ROWS * SLAB_ROW;
                fourth(now, ahead, sums, at, rows);
            }
            const u32 own = WITH_NARROW && SPLIT > 1 ? 0 : now.last();
            next(WITH_NARROW ? narrow.last() ^ own : own);
            q += phases;
            if (q + part.phase >= end) break;
            enter(at, rows);
            fourth(now, ahead, sums, at, rows);
        }
        now.add(sums, 3);
        skip(q);
    }

    // FP8 and bf16. Half a step has at least two of these slots, so a pair (SPLIT 2) is never cut.
    DEVICE void others(Sums& sums, int q, const WorkTile& item) const {
        const int sixteens = item.columns() / 16;
        for (; q + part.phase < end; q += phases) {
            wait();
#pragma unroll 1
            for (int i = 0; i < SPLIT; i++) {
                const int own = q + part.phase + i;
                // The slot's slab within the stage; `own * sixteens % 4` is its place in the slab.
                const int at = own * sixteens / 4 - q * sixteens / 4;
                add_slot(sums, slot() + i * SLOT, slab(at), own * sixteens % 4, item, part.side);
            }
            next(last_of(sums));
        }
        skip(q);
    }
};
