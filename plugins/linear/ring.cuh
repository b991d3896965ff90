// What a block streams. One warp asks the copy engine for it, stage by stage across the items of the
// block, and WARPS multiply. A stage holds a slot of weight for each of those and the rows that they
// meet; the first stages' weights are asked for before the kernel before this one has ended.
//
// Compile-time: WARPS, 8 or 4; KINDS, the kinds of weight that occur (1 << kind); ROW_TILES, row
// tiles of 16; PARTS, blocks of a cluster; NARROW, whether items may have a narrow tile.
#pragma once
#include "linear/units.cuh"

constexpr int ROWS = 16 * ROW_TILES;
// Warps that share the columns of a slot: with twice the rows a warp makes half of an n-tile, so
// that its sums take no more registers, and of each stage takes twice the slots.
constexpr int SPLIT = ROW_TILES;
constexpr int STRIPS = 8 / SPLIT;  // of 8 columns, that a warp makes
constexpr bool ONLY_NVFP4 = KINDS == 1 << NVFP4;

constexpr int SLOT = NVFP4_SLOT;
constexpr int ROWS_AT = WARPS * SLOT;
constexpr int STAGE_SLABS = NARROW || WARPS == 4 ? 2 : 4;  // at most
constexpr int NARROW_AT = ROWS_AT + STAGE_SLABS * ROWS * SLAB_ROW;
constexpr int STAGE_BYTES = NARROW_AT + NARROW * STAGE_SLABS * NARROW_SLOT;
// Two blocks, or three with half of the warps, have room on a multiprocessor.
constexpr int STAGES = ROW_TILES > 1 ? 2 : 3;
static_assert(WARPS == 4 || WARPS == 8, "warps of an n-tile share its slots");
static_assert(!NARROW || (ONLY_NVFP4 && PARTS == 2 && WARPS == 8), "where a narrow tile's slots and sums fit");

// 16 columns that are made together with n-tiles: a stage holds its slot of every slab, and each
// warp of the block multiplies a quarter of one.
struct NarrowTile {
    u32 offset, stride;  // in the packed weight, 64 bytes; of a step, 512 bytes
    int column;          // below 0: no tile

    DEVICE bool there() const { return NARROW && column >= 0; }
};

// Up to four neighbouring n-tiles of one group, or half of a bf16 one. A cluster makes them, each of
// its blocks a run of K.
struct Item {
    u32 offset, stride;  // of the first tile in the packed weight; of a step; 512 bytes
    int column;          // first packed column
    int kind, tiles;
    int left;            // items of the cluster after this one
    bool half;
    NarrowTile narrow;

    // Half n-tiles.
    DEVICE int halves() const { return 2 * tiles - half; }

    // What a warp takes at once is a slot, or the halves of two neighbouring ones: how many that are
    // of half a step, and K of each.
    DEVICE int slots() const { return slots_of(kind) >> half; }
    DEVICE int columns() const { return slot_columns(kind) << half; }

    // n-tiles, there or not, that a block's warps are dealt to; and warps of one, which take its
    // slots in turn.
    DEVICE int lanes() const { return WARPS >> phase_bits(); }
    DEVICE int phases() const { return 1 << phase_bits(); }
    // Warps of an n-tile that make sums of the same columns.
    DEVICE int groups() const { return phases() / SPLIT; }
    // Where in a stage a slot lies: as steps are stored, [step][n-tile][half of it], or one after
    // the other.
    DEVICE int slot_at(int tile, int phase) const {
        const bool steps = ONLY_NVFP4 || kind == NVFP4;
        const int before = steps ? (phase / 2 * tiles + tile) * 2 : tile * phases();
        return (before + (steps ? phase % 2 : phase)) * SLOT;
    }
    DEVICE int phase_bits() const {
        if (NARROW || WARPS == 4 || tiles > 2 || PARTS > 4) return 1;
        return tiles == 1 && PARTS == 2 && kind != NVFP4 ? 3 : 2;
    }
};

// What a warp makes of an item: columns of one n-tile, of some of the slots of each stage.
struct Part {
    int tile, phase;  // phase: of the first slot of a stage
    int side;         // which of the warps that share columns

    DEVICE Part(const Item& item, int warp) {
        const int own = warp & item.phases() - 1;
        tile = warp >> item.phase_bits();
        side = own % SPLIT;
        phase = own / SPLIT * SPLIT;
    }
    // Half an n-tile has one side.
    DEVICE bool of(const Item& item) const {
        return tile < item.tiles && (SPLIT == 1 || !item.half || side == 0);
    }
};

// items: two int4 each.
DEVICE Item item_at(const int4* items) {
    const int4 a = items[0], n = NARROW ? items[1] : make_int4(0, 0, -1, 0);
    const int kind = ONLY_NVFP4 ? NVFP4 : a.w & 3;
    const bool half = !ONLY_NVFP4 && (a.w & 4);
    return {static_cast<u32>(a.x),
            static_cast<u32>(a.y),
            a.z,
            kind,
            a.w >> 8 & 255,
            a.w >> 16,
            half,
            {static_cast<u32>(n.x), static_cast<u32>(n.y), n.z}};
}

// The block's half steps of K, whole steps but for the last one, whose second half may lie past K.
constexpr int HALF_K = STEP_K / 2;
struct Halves {
    int begin, end;
};

DEVICE Halves halves_of(int k, int first_step, int end_step) {
    return {2 * first_step, min(2 * end_step, (k + HALF_K - 1) / HALF_K)};
}

// Where a block stands: the slots of K q.. of an item.
struct Walk {
    const int4* table;
    int at;  // of the item, in the table
    Halves halves;
    Item item;
    int q, end;
    bool over;

    DEVICE void open() {
        item = item_at(table + at);
        q = halves.begin * item.slots();
        end = halves.end * item.slots();
    }
    // To the first stage, or over: a block may have none.
    DEVICE void start() {
        open();
        over = q >= end;
    }
    DEVICE void next() {
        q += item.phases();
        if (q < end) return;
        over = item.left == 0;
        if (over) return;
        at += 2;
        open();
    }
};

// The barriers of a stage, and which one is in turn.
struct Turn {
    saddr stages, full, empty;
    u32 stage, parity;

    DEVICE void start(saddr memory, saddr barriers) {
        stages = memory;
        full = barriers;
        empty = barriers + 8 * STAGES;
        stage = parity = 0;
    }
    DEVICE saddr bytes() const { return stages + stage * STAGE_BYTES; }
    DEVICE saddr filled() const { return full + 8 * stage; }
    DEVICE saddr read() const { return empty + 8 * stage; }
    DEVICE void next() {
        const bool wrap = stage == STAGES - 1;
        stage = wrap ? 0 : stage + 1;
        parity ^= wrap;
    }
};

// What a lane asks for of a stage, found out before the stage is free: a piece of weight, a piece of
// rows. Where there are no bytes it asks for nothing.
struct Wish {
    const u8 *weight, *rows;
    u32 weight_at, weight_bytes;  // in the stage
    u32 rows_at, row_bytes;
    u32 all;  // bytes of the stage, of all lanes
};

// The warp that asks.
struct Source {
    const u8* packed;
    const u8* slabs;
    int rows;

    // The first slab of a stage, and the one after its last.
    DEVICE static int first_slab(const Walk& at) {
        return at.q * at.item.columns() / SLAB_COLUMNS;
    }
    DEVICE static int end_slab(const Walk& at) {
        const int end = min(at.q + at.item.phases(), at.end) * at.item.columns();
        return (end + SLAB_COLUMNS - 1) / SLAB_COLUMNS;
    }

    DEVICE Wish wish(const Walk& at) const {
        Wish w = rows_of(at);
        w.weight_bytes = 0;
        if (ONLY_NVFP4 || at.item.kind == NVFP4) {
            steps(w, at);
        } else {
            slots(w, at);
        }
        return w;
    }
    // NVFP4: a lane a step of all n-tiles, which lies together. Of a last step that is half padding
    // the padding comes too.
    DEVICE void steps(Wish& w, const Walk& at) const {
        const int lane = threadIdx.x % 32;
        const int count = (min(at.item.phases(), at.end - at.q) + 1) / 2;
        const u32 bytes = at.item.tiles * step_bytes(NVFP4);
        w.all += count * bytes;
        if (lane < count) {
            const u64 step = static_cast<u64>(at.item.stride) * (at.q / 2 + lane);
            w.weight = packed + (at.item.offset + step) * 512;
            w.weight_at = lane * bytes;
            w.weight_bytes = bytes;
        }
        if (NARROW && at.item.narrow.there()) narrow(w, at, lane - WARPS);
    }
    // Other kinds: a lane a slot, or half of one.
    DEVICE void slots(Wish& w, const Walk& at) const {
        const int lane = threadIdx.x % 32, kind = at.item.kind, bits = at.item.phase_bits();
        const int half = at.item.half, warp = lane % WARPS, part = lane / WARPS;
        const int tile = warp >> bits, q = at.q + (warp & (1 << bits) - 1);
        const bool there = part <= half && tile < at.item.tiles && q < at.end;
        const u32 bytes = PLAIN_SLOT >> half;
        w.all += __popc(ballot(there)) * bytes;
        if (!there) return;
        const int in_step = 2 * slots_of(kind), stored = (q << half) + part;
        const u64 step = static_cast<u64>(at.item.stride) * (stored >> kind + 1);
        w.weight = packed + (at.item.offset + step) * 512 +
                   (tile * in_step + (stored & in_step - 1)) * PLAIN_SLOT;
        w.weight_at = warp * SLOT + part * bytes;
        w.weight_bytes = bytes;
    }
    // Slot `i` of the stage, of a narrow tile.
    DEVICE void narrow(Wish& w, const Walk& at, int i) const {
        const NarrowTile& tile = at.item.narrow;
        const int count = min(STAGE_SLABS, at.end - at.q), q = at.q + i;
        w.all += count * NARROW_SLOT;
        if (i < 0 || i >= count) return;
        const u64 step = static_cast<u64>(tile.stride) * (q >> 1) * 512;
        w.weight = packed + static_cast<u64>(tile.offset) * 64 + step + (q & 1) * NVFP4_SLOT;
        w.weight_at = NARROW_AT + i * NARROW_SLOT;
        w.weight_bytes = NARROW_SLOT;
    }
    // Of a stage's rows alone.
    DEVICE Wish rows_of(const Walk& at) const {
        const int lane = threadIdx.x % 32, first = first_slab(at), count = end_slab(at) - first;
        const u32 each = rows * SLAB_ROW;
        const bool whole = rows == ROWS;  // then they lie in the stage as they come
        Wish w;
        w.all = count * each;
        w.rows = slabs + (static_cast<i64>(first) + lane) * each;
        w.rows_at = ROWS_AT + lane * ROWS * SLAB_ROW;
        w.row_bytes = whole ? (lane == 0 ? count * each : 0) : lane < count ? each : 0;
        return w;
    }

    // Announces a stage and asks for its weights.
    DEVICE static void ask_weights(const Wish& w, const Turn& turn) {
        if (threadIdx.x % 32 == 0) barrier_expect(turn.filled(), w.all);
        sync_warp();
        if (w.weight_bytes) {
            copy_bulk(turn.bytes() + w.weight_at, w.weight, w.weight_bytes, turn.filled());
        }
    }
    DEVICE static void ask_rows(const Wish& w, const Turn& turn) {
        if (w.row_bytes) {
            copy_bulk_kept(turn.bytes() + w.rows_at, w.rows, w.row_bytes, turn.filled());
        }
    }
};
