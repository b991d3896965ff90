// The multistage pipeline of a block: a circular buffer of STAGES stages in shared memory. One
// producer warp issues the bulk copies, stage by stage across the block's work tiles; WARPS consumer
// warps multiply. A stage holds one slot of weights for each consumer warp, and the rows to multiply
// it with. The weights of the first stages are copied before the previous kernel has ended.
//
// Compile-time: K_SIZE, columns of the rows; WARPS, multiplying warps, 8 or 4; KINDS, the
// occurring kinds of weight (1 << kind); ROW_TILES, row tiles of 16; FULL, whether these are full
// of rows; PARTS, blocks of a cluster; MANY, whether a cluster may have more than one item;
// TILES, n-tiles of every NVFP4 item, 0 if they differ; LANES, the largest WorkTile::lanes; NARROW,
// whether items may have a narrow tile; HEAD_SCALE, see head_norm.cuh; LOADED, for which clusters the
// first item is loaded instead of computed (FirstTiles).
#pragma once
#include "linear/packed_weight.cuh"

constexpr int ROWS = 16 * ROW_TILES;
// Warps that share the columns of a slot. With twice the rows, a warp computes only half of an
// n-tile, so that its sums take no more registers, and takes twice as many slots of each stage.
constexpr int SPLIT = ROW_TILES;
constexpr int STRIPS = 8 / SPLIT;  // strips of 8 columns that a warp computes
constexpr bool ONLY_NVFP4 = KINDS == 1 << NVFP4;
// Whether it is known when compiled that each n-tile of an item has two warps.
constexpr bool PAIRS =
    NARROW || HEAD_SCALE || WARPS == 4 || PARTS > 4 || (ONLY_NVFP4 && TILES > 2);
enum { NO_CLUSTER, SOME_CLUSTERS, ALL_CLUSTERS };  // LOADED

constexpr int STEPS = (K_SIZE + STEP_K - 1) / STEP_K;
constexpr int SLOT = NVFP4_SLOT;
constexpr int ROWS_AT = WARPS * SLOT;
constexpr int STAGE_SLABS = NARROW || HEAD_SCALE || WARPS == 4 ? 2 : 4;  // at most
constexpr int NARROW_AT = ROWS_AT + STAGE_SLABS * ROWS * SLAB_ROW;
constexpr int STAGE_BYTES = NARROW_AT + NARROW * STAGE_SLABS * NARROW_SLOT;
// So that two blocks, or three with half of the warps, fit on a multiprocessor.
constexpr int STAGES = ROW_TILES > 1 ? 2 : 3;
// Most stages of a block that are in flight at a time. With more, what all blocks wait for arrives
// later: rows, partial sums, the stages of blocks that start last.
constexpr int ON_THE_WAY = 2;
constexpr bool PACED = STAGES > ON_THE_WAY;
static_assert(!PACED || STAGES == ON_THE_WAY + 1, "produce's `before` starts at the second stage");
static_assert(WARPS == 4 || WARPS == 8, "warps of an n-tile share its slots");
static_assert(!NARROW || (ONLY_NVFP4 && PARTS == 2 && WARPS == 8), "where a narrow tile's slots and sums fit");

// 16 columns that are computed together with n-tiles: a stage holds the tile's slot for each of its
// slabs, and each warp of the block multiplies a quarter of a slot.
struct NarrowTile {
    u32 offset, stride;  // in the packed weight, unit 64 bytes; of a step, unit 512 bytes
    int column;          // below 0: no tile

    DEVICE bool there() const { return NARROW && column >= 0; }
};

// The work tile of a cluster: up to four neighbouring n-tiles of one group, or half of a bf16 n-tile.
// Split-K: each block of the cluster computes it over a range of K.
struct WorkTile {
    u32 offset, stride;  // of the first tile in the packed weight; of a step; unit 512 bytes
    int column;          // first packed column
    int kind, tiles;
    int left;            // items of the cluster after this one
    bool half;
    NarrowTile narrow;

    // Number of half n-tiles.
    DEVICE int halves() const { return 2 * tiles - half; }

    // A warp processes one slot at a time or, in half an n-tile, the halves of two neighbouring
    // slots. How many such units half a step has, and the extent of each along K.
    DEVICE int slots() const { return slots_of(kind) >> half; }
    DEVICE int columns() const { return slot_columns(kind) << half; }

    // Among how many n-tiles a block's warps are divided (the item may have fewer), and the number
    // of warps for each, which take its slots in turn.
    DEVICE int lanes() const { return WARPS >> phase_bits(); }
    DEVICE int phases() const { return 1 << phase_bits(); }
    // Warps of an n-tile that compute sums of the same columns.
    DEVICE int groups() const { return phases() / SPLIT; }
    // Offset of a slot in a stage. NVFP4 slots lie as steps are stored, [step][n-tile][half step];
    // those of other kinds as [n-tile][phase].
    DEVICE int slot_at(int tile, int phase) const {
        const bool steps = ONLY_NVFP4 || kind == NVFP4;
        const int before = steps ? (phase / 2 * tiles + tile) * 2 : tile * phases();
        return (before + (steps ? phase % 2 : phase)) * SLOT;
    }
    DEVICE int phase_bits() const {
        if (PAIRS || tiles > 2) return 1;
        return tiles == 1 && PARTS == 2 && kind != NVFP4 ? 3 : 2;
    }
};

// A warp's part of a work tile: columns of one n-tile, over some of the slots of each stage.
struct WarpTile {
    int tile, phase;  // phase: number of the warp's first slot in a stage
    int side;         // which half of the columns, where two warps share them

    DEVICE WarpTile(const WorkTile& item, int warp) {
        const int own = warp & item.phases() - 1;
        tile = warp >> item.phase_bits();
        side = own % SPLIT;
        phase = own / SPLIT * SPLIT;
    }
    // Whether the warp has a part of the item. Half an n-tile has only side 0.
    DEVICE bool of(const WorkTile& item) const {
        return tile < item.tiles && (SPLIT == 1 || !item.half || side == 0);
    }
};

// A work tile as the table in device memory has it.
struct TileEntry {
    int4 a, n;  // n-tiles, narrow tile
};

DEVICE TileEntry entry_at(const int4* items) {
    return {items[0], NARROW ? items[1] : make_int4(0, 0, -1, 0)};
}
// The same, loaded before anything that follows: an ordinary load may be delayed until it is used.
DEVICE TileEntry entry_now(const int4* items) {
    return {load_now(items), NARROW ? load_now(items + 1) : make_int4(0, 0, -1, 0)};
}

// The first items of all clusters but the first `loaded`, computed: a load would take longer, and
// longest in the blocks that start last, while everything else keeps memory busy, and everyone waits
// for these. In order, these clusters have the first n-tiles of the packed weight, TILES at a time.
// With narrow tiles all clusters load: computing these too would take no less.
struct FirstTiles {
    int loaded;
    int tiles;  // n-tiles of the packed weight's first groups, which are NVFP4

    DEVICE TileEntry entry(int cluster) const {
        constexpr int UNITS = step_bytes(NVFP4) / 512, EACH = TILES ? TILES : 1;
        constexpr int IN_GROUP = GROUP_TILES / EACH;
        const int i = cluster - loaded, group = i / IN_GROUP, first = i - group * IN_GROUP;
        const int of_group = min(GROUP_TILES, tiles - group * GROUP_TILES);
        return {make_int4(group * (GROUP_TILES * UNITS * STEPS) + first * (EACH * UNITS),
                          of_group * UNITS, i * (EACH * TILE_COLUMNS), EACH << 8),
                make_int4(0, 0, -1, 0)};
    }
};

DEVICE WorkTile item_of(const TileEntry& entry) {
    const int4 a = entry.a, n = entry.n;
    const int kind = ONLY_NVFP4 ? NVFP4 : a.w & 3;
    const bool half = !ONLY_NVFP4 && (a.w & 4);
    return {static_cast<u32>(a.x),
            static_cast<u32>(a.y),
            a.z,
            kind,
            TILES && kind == NVFP4 ? TILES : a.w >> 8 & 255,
            MANY ? a.w >> 16 : 0,
            half,
            {static_cast<u32>(n.x), static_cast<u32>(n.y), n.z}};
}

// The block's half steps of K: whole steps, except that of the last step the second half is left
// out if it lies past K.
constexpr int HALF_K = STEP_K / 2;
struct Halves {
    int begin, end;

    DEVICE int steps() const { return (end - begin + 1) / 2; }
};

DEVICE Halves halves_of(int rank) {
    constexpr int ALL = (K_SIZE + HALF_K - 1) / HALF_K;
    const int begin = 2 * (STEPS * rank / PARTS);
    if (ALL % (2 * PARTS) == 0) return {begin, begin + ALL / PARTS};
    return {begin, min(2 * (STEPS * (rank + 1) / PARTS), ALL)};
}

// Iterates over the stages of a block's work tiles. At the stage whose first slot is number q of the
// work tile.
struct TileIterator {
    const int4* table;
    int at;  // index of the item in the table
    Halves halves;
    WorkTile item;
    int q, end;
    bool over;

    DEVICE void open(const TileEntry& entry) {
        item = item_of(entry);
        q = halves.begin * item.slots();
        end = halves.end * item.slots();
    }
    DEVICE void open() { open(entry_at(table + at)); }
    // Goes to the first stage; `over` is set if the block has none.
    DEVICE void start(const TileEntry& entry) {
        open(entry);
        over = q >= end;
    }
    DEVICE void next() {
        q += item.phases();
        if (q < end) return;
        over = !MANY || item.left == 0;
        if (over) return;
        at += 2;
        open();
    }
};

// The current stage of the pipeline: its index, the parity of its phase, its full and empty barriers.
struct PipelineState {
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

// The bulk copies that a lane of the producer warp issues for a stage, computed before the stage is
// free: one of weights and one of rows. A copy of 0 bytes is not issued.
struct StageCopies {
    const u8 *weight, *rows;
    u32 weight_at, weight_bytes;  // weight_at: offset in the stage
    u32 rows_at, row_bytes;
    u32 all_weights, all_rows;  // bytes of the stage, summed over all lanes
    u32 weight_step, rows_step;  // from these copies to those of the next stage, bytes; NVFP4 only

    DEVICE void advance() { weight += weight_step, rows += rows_step; }
};

// The global memory that the producer warp copies from.
struct Source {
    const u8* packed;
    const u8* slabs;
    int rows;

    // Whether the next stage's copies are those of this one, advanced: both are whole stages of one
    // item.
    DEVICE static bool advances(const TileIterator& at) {
        return (ONLY_NVFP4 || at.item.kind == NVFP4) && at.q + 2 * at.item.phases() <= at.end;
    }
    // The first slab of a stage, and the end (one past the last).
    DEVICE static int first_slab(const TileIterator& at) {
        return at.q * at.item.columns() / SLAB_COLUMNS;
    }
    DEVICE static int end_slab(const TileIterator& at) {
        const int end = min(at.q + at.item.phases(), at.end) * at.item.columns();
        return (end + SLAB_COLUMNS - 1) / SLAB_COLUMNS;
    }

    DEVICE StageCopies copies(const TileIterator& at) const {
        StageCopies w = rows_of(at);
        w.weight_bytes = w.all_weights = 0;
        if (ONLY_NVFP4 || at.item.kind == NVFP4) {
            steps(w, at);
        } else {
            slots(w, at);
        }
        return w;
    }
    // NVFP4: each lane copies one step of all n-tiles, which is contiguous. If half of the last
    // step is padding, the padding is copied too.
    DEVICE void steps(StageCopies& w, const TileIterator& at) const {
        const int lane = threadIdx.x % 32;
        const int count = (min(at.item.phases(), at.end - at.q) + 1) / 2;
        const u32 bytes = at.item.tiles * step_bytes(NVFP4);
        w.all_weights += count * bytes;
        w.weight_step = at.item.phases() / 2 * at.item.stride * 512;
        if (lane < count) {
            const u64 step = static_cast<u64>(at.item.stride) * (at.q / 2 + lane);
            w.weight = packed + (at.item.offset + step) * 512;
            w.weight_at = lane * bytes;
            w.weight_bytes = bytes;
        }
        if (NARROW && at.item.narrow.there()) narrow(w, at, lane - WARPS);
    }
    // Other kinds: each lane copies one slot, or half of one.
    DEVICE void slots(StageCopies& w, const TileIterator& at) const {
        const int lane = threadIdx.x % 32, kind = at.item.kind, bits = at.item.phase_bits();
        const int half = at.item.half, warp = lane % WARPS, part = lane / WARPS;
        const int tile = warp >> bits, q = at.q + (warp & (1 << bits) - 1);
        const bool there = part <= half && tile < at.item.tiles && q < at.end;
        const u32 bytes = PLAIN_SLOT >> half;
        w.all_weights += __popc(ballot(there)) * bytes;
        if (!there) return;
        const int in_step = 2 * slots_of(kind), stored = (q << half) + part;
        const u64 step = static_cast<u64>(at.item.stride) * (stored >> kind + 1);
        w.weight = packed + (at.item.offset + step) * 512 +
                   (tile * in_step + (stored & in_step - 1)) * PLAIN_SLOT;
        w.weight_at = warp * SLOT + part * bytes;
        w.weight_bytes = bytes;
    }
    // The narrow tile's slot number `i` of the stage.
    DEVICE void narrow(StageCopies& w, const TileIterator& at, int i) const {
        const NarrowTile& tile = at.item.narrow;
        const int count = min(STAGE_SLABS, at.end - at.q), q = at.q + i;
        w.all_weights += count * NARROW_SLOT;
        if (i < 0 || i >= count) return;
        const u64 step = static_cast<u64>(tile.stride) * (q >> 1) * 512;
        w.weight = packed + static_cast<u64>(tile.offset) * 64 + step + (q & 1) * NVFP4_SLOT;
        w.weight_at = NARROW_AT + i * NARROW_SLOT;
        w.weight_bytes = NARROW_SLOT;
        w.weight_step = at.item.phases() / 2 * tile.stride * 512;
    }
    // Fills in the row copies of a stage only.
    DEVICE StageCopies rows_of(const TileIterator& at) const {
        const int lane = threadIdx.x % 32, first = first_slab(at), count = end_slab(at) - first;
        const u32 each = rows * SLAB_ROW;
        StageCopies w;
        w.all_rows = count * each;
        w.rows = slabs + (static_cast<i64>(first) + lane) * each;
        w.rows_at = ROWS_AT + lane * ROWS * SLAB_ROW;
        // Of full row tiles, all slabs are one contiguous copy.
        w.row_bytes = FULL ? (lane == 0 ? count * each : 0) : lane < count ? each : 0;
        w.rows_step = at.item.phases() * at.item.columns() / SLAB_COLUMNS * each;
        return w;
    }

    // Announces the bytes of copies that are requested next, and arrives: a barrier's phase ends when
    // all have come.
    DEVICE static void announce(saddr barrier, u32 bytes) {
        if (threadIdx.x % 32 == 0) barrier_expect(barrier, bytes);
        sync_warp();
    }
    // The same without arriving, so that the phase does not end before something else, either.
    DEVICE static void announce_part(saddr barrier, u32 bytes) {
        if (threadIdx.x % 32 == 0) barrier_announce(barrier, bytes);
        sync_warp();
    }
    DEVICE static void copy_weights(const StageCopies& w, const PipelineState& state, saddr barrier) {
        if (w.weight_bytes) {
            copy_bulk(state.bytes() + w.weight_at, w.weight, w.weight_bytes, barrier);
        }
    }
    DEVICE static void copy_rows(const StageCopies& w, const PipelineState& state) {
        if (w.row_bytes) {
            copy_bulk_kept(state.bytes() + w.rows_at, w.rows, w.row_bytes, state.filled());
        }
    }
};

// The next stage that the producer warp fills.
struct NextStage {
    const Source& source;
    PipelineState state;
    TileIterator at;
    StageCopies copies;
    bool known;  // whether `copies` is what to request at `at`

    DEVICE void prepare() {
        if (!known) copies = source.copies(at);
    }
    DEVICE void pass() {
        known = Source::advances(at);
        if (known) copies.advance();
        at.next();
        state.next();
    }
};
