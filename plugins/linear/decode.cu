// rows x packed weight -> rows, for up to 32 rows: bound by reading the weight from memory, once.
//
// Columns are divided among clusters of blocks, K among the blocks of a cluster, and slots of K
// among the warps of a block. One producer warp issues the bulk copies of weights and rows
// (pipeline.cuh); the other warps multiply and do not wait for each other. Two blocks share a
// multiprocessor (three with half of the warps), and a block of the next kernel starts as soon as
// one has exited. At the end of an item, up to 256 columns, the warps add up their sums and send them
// to the block of the cluster that adds those of all blocks in order of k (cluster_reduce.cuh). No sum depends
// on timing.
//
// An item may include a narrow tile: with each of its own slots, a warp also multiplies 16 of K of
// one of the narrow tile's slots. The item then takes a sixteenth longer for all warps, instead of
// a quarter longer for two of them.
//
// The kernel that made the input rows (x_slabs) has applied the norm's weight and the gate to them;
// the missing factor 1 / rms is computed from x_squares. That of a row is applied in the epilogue,
// those of a row's heads while K is gone through (head_norm.cuh).
//
// Compile-time: K_SIZE, WARPS, ROW_TILES, FULL, KINDS, PARTS, MANY, TILES, NARROW, LOADED
// (pipeline.cuh); ROW_SCALE, HEAD_SCALE, whether x_squares is given and rows, or their heads, lack
// 1 / rms; EPILOGUE, NEXT (epilogue.cuh). What is known when a launch is compiled is not computed in
// each block: a launch is so short that its ends count.
#include "cuda/prefetch.cuh"
#include "linear/epilogue.cuh"
#include "linear/mainloop.cuh"

constexpr int THREADS = 32 * (WARPS + 1);
constexpr int PARTIALS_AT = STAGES * STAGE_BYTES;
constexpr int BARRIERS_AT = PARTIALS_AT + PARTIALS_BYTES;
constexpr int SCALES_AT = BARRIERS_AT + 96;
constexpr int STAGED_AT = BARRIERS_AT + 256;
constexpr int FACTORS_AT = STAGED_AT + WARPS * STAGED_BYTES;
static_assert(8 * (3 * STAGES + 3) <= 96 && 96 + 4 * ROWS <= 256, "barriers, row scales fit");
static_assert(SCALES_AT % 16 == 0, "row scales are stored four at a time");

// Zeroes the row buffers if there are fewer than ROWS rows, since no copy fills the remaining ones.
DEVICE void clear_rows(u8* memory, int rows) {
    if (FULL) return;
    constexpr int EACH = STAGE_SLABS * ROWS * SLAB_ROW / 16;
#pragma unroll 1
    for (int i = threadIdx.x; i < STAGES * EACH; i += THREADS) {
        reinterpret_cast<uint4*>(memory + i / EACH * STAGE_BYTES + ROWS_AT)[i % EACH] =
            make_uint4(0, 0, 0, 0);
    }
    barrier_init_done();
}

// Called by one thread.
DEVICE void init_barriers(const PipelineState& state, const PartialSumBuffer& partials, saddr scales_made, saddr early) {
    for (int i = 0; i < STAGES; i++) {
        barrier_init(state.full + 8 * i, 1);
        barrier_init(state.empty + 8 * i, 32 * WARPS);
        if (PACED) barrier_init(early + 8 * i, 1);
    }
    barrier_init(partials.arrived, 1);
    barrier_init(partials.free, PartialSumBuffer::READERS);
    barrier_init(scales_made, 32);
    barrier_init_done();
}

// How the factors 1 / rms are made.
struct Scaling {
    const float* squares;  // heads: from the block's first head on
    float* factors;
    saddr made;  // barrier
    float eps;
    int heads;  // of the block

    DEVICE void make() const {
        if (HEAD_SCALE) {
            head_factors(factors, squares, heads, eps);
        } else {
            row_scales(factors, squares, eps);
        }
        barrier_arrive(made);
    }
};

// The producer warp. It requests the first stages' weights, their rows once the previous kernel has
// written them, and then one stage whenever a stage has been read and, if PACED, no more than
// ON_THE_WAY would be on their way. What to request next is computed before each wait. The row
// scales, which only the epilogue needs, are computed once the whole first item has been requested;
// the factors of heads, which the second stage needs, when the first stages have been.
// Blocks that start last have the previous kernel's results at once, and everyone waits for these
// blocks: so nothing else comes before the first requests.
//
// `early`: barriers, for PACED, of the weights of the first STAGES stages. These may come long
// before the rows, for which the stages' own barriers wait too.
DEVICE void produce(const Source& source, PipelineState state, TileIterator at, saddr early, const Scaling& scaling,
                const Following& following, const PartialSumBuffer& partials) {
    PipelineState row_state = state, early_state = state;
    TileIterator again = at;
    const int first = at.at;
    int requested = 0;
    NextStage next_stage = {source, state, at, {}, false};
#pragma unroll 1
    for (; requested < STAGES && !next_stage.at.over; requested++) {
        next_stage.prepare();
        if (PACED && requested >= ON_THE_WAY) barrier_wait(early + 8 * (requested - ON_THE_WAY), 0);
        const saddr barrier = PACED ? early + 8 * requested : next_stage.state.filled();
        source.announce(barrier, next_stage.copies.all_weights + (PACED ? 0 : next_stage.copies.all_rows));
        source.copy_weights(next_stage.copies, next_stage.state, barrier);
        next_stage.pass();
    }
    if (threadIdx.x % 32 == 0) partials.expect(at.item, 0, cluster_rank());
    following.fetch();
    StageCopies rows;
    if (!again.over) rows = source.rows_of(again);
    cluster_wait();
    wait_for_previous();
#pragma unroll 1
    for (int i = 0; i < requested; i++) {
        if (i > 0) rows = source.rows_of(again);
        if (PACED) source.announce_part(row_state.filled(), rows.all_rows);
        source.copy_rows(rows, row_state);
        again.next();
        row_state.next();
    }
#pragma unroll 1
    for (int i = 0; PACED && i < requested; i++) {
        barrier_wait(early + 8 * i, 0);
        if (threadIdx.x % 32 == 0) barrier_arrive(early_state.filled());
        early_state.next();
    }
    PipelineState before = state;  // ON_THE_WAY stages before the next one to request
    before.next();
    if (HEAD_SCALE) scaling.make();
    bool scaled = !ROW_SCALE;
#pragma unroll 1
    for (;;) {
        if (!scaled && (next_stage.at.over || MANY && next_stage.at.at != first)) {
            scaling.make();
            scaled = true;
        }
        if (next_stage.at.over) return;
        next_stage.prepare();
        if (PACED) {
            barrier_wait(before.filled(), before.parity);
            before.next();
        }
        const saddr filled = next_stage.state.filled();
        barrier_wait(next_stage.state.read(), next_stage.state.parity ^ 1);
        source.announce(filled, next_stage.copies.all_weights + next_stage.copies.all_rows);
        source.copy_weights(next_stage.copies, next_stage.state, filled);
        source.copy_rows(next_stage.copies, next_stage.state);
        next_stage.pass();
    }
}

// The kernel's arguments, in the order of decode_launch.py. items: [clusters, most_items, 2].
struct Params {
    const u8* packed;
    const u8* slabs;
    const float* x_squares;
    Results to;
    const int4* items;
    int most_items;
    FirstTiles computed_tiles;
    float eps;
    Following following;
};

// Where a block gets its cluster's first item.
struct Computed {
    DEVICE TileEntry operator()(const Params& params, int cluster) const {
        return params.computed_tiles.entry(cluster);
    }
};
struct Loaded {
    TileEntry entry;  // on its way while the barriers are initialised
    DEVICE TileEntry operator()(const Params&, int) const { return entry; }
};

template <class First>
DEVICE void run(u8* memory, const Params& params, int cluster, const First& first_entry) {
    const int rows = params.to.rows;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int rank = cluster_rank();
    TileIterator at;
    at.table = params.items;
    at.at = cluster * params.most_items * 2;
    at.halves = halves_of(rank);
    const saddr barriers = shared_address(memory + BARRIERS_AT);
    PipelineState state;
    state.start(shared_address(memory), barriers);
    PartialSumBuffer partials = {shared_address(memory + PARTIALS_AT), barriers + 16 * STAGES,
                 barriers + 16 * STAGES + 8};
    const saddr scales_made = barriers + 16 * STAGES + 16, early = scales_made + 8;
    constexpr int MADE_AT = HEAD_SCALE ? FACTORS_AT : SCALES_AT;
    clear_rows(memory, rows);
    if (warp == WARPS && lane == 0) init_barriers(state, partials, scales_made, early);
    if (!FULL) sync_block();  // the relaxed cluster barrier publishes no memory writes
    cluster_arrive_relaxed();
    if (warp == WARPS) {
        at.start(first_entry(params, cluster));
        const int first_head = HEAD_SCALE ? at.halves.begin / 2 : 0;
        produce({params.packed, params.slabs, rows}, state, at, early,
            {params.x_squares + first_head * HEAD_ROWS * HEAD_PIECES,
             reinterpret_cast<float*>(memory + MADE_AT), scales_made, params.eps,
             at.halves.steps()},
            params.following, partials);
        return;
    }
    at.start(first_entry(params, cluster));  // here, without what only the producer needs
    const Results& to = params.to;
    const saddr staged = shared_address(memory) + STAGED_AT + warp * STAGED_BYTES;
    WarpShare(at.item, rank).stage(staged, to, at.item);
    cluster_wait();
    wait_for_previous();
    const u32 row_at = ROWS_AT + lane % 16 * SLAB_ROW + (lane % 8 ^ lane / 16) * 16;
    const saddr made = shared_address(memory) + MADE_AT;
    // Of the current item among those of the cluster.
    const auto number = [&] { return MANY ? at.at / 2 - cluster * params.most_items : 0; };
    for (;;) {
        const WorkTile item = at.item;
        const WarpTile part(item, warp);
        const bool active = part.of(item) && at.q + part.phase < at.end;
        const u32 slot_at = item.slot_at(part.tile, part.phase);
        const Mainloop mainloop = {state, slot_at, row_at, at.end, item.phases(), part};
        Heads heads(made, scales_made);
        Sums sums;
        NarrowSums narrow_sums;
        clear(sums);
        clear_narrow(narrow_sums);
        if (item.narrow.there()) {
            if (active) {
                mainloop.nvfp4_narrow<true>(sums, narrow_sums, at.q);
            } else {
                mainloop.only_narrow(narrow_sums, at.q);
            }
        } else if (!active) {
            mainloop.skip(at.q);
        } else if (NARROW) {
            mainloop.nvfp4_narrow<false>(sums, narrow_sums, at.q);
        } else if (ONLY_NVFP4 || (KINDS & 1 << NVFP4 && item.kind == NVFP4)) {
            mainloop.nvfp4(sums, at.q, heads);
        } else {
            mainloop.others(sums, at.q, item);
        }
        // Known again from `at` and cluster_rank(): kept across the loop, these would occupy registers.
        run_epilogue(sums, narrow_sums, partials, scales_made, to, item, staged, number(), cluster_rank());
        if (!MANY || item.left == 0) return;
        at.at += 2;
        at.open();
        sync_warp();  // all lanes have read the staged data, which is overwritten now
        WarpShare(at.item, cluster_rank()).stage(staged, to, at.item);
        if (threadIdx.x == 0) {
            barrier_wait_cluster(partials.arrived, PartialSumBuffer::parity_before(number()));
            partials.expect(at.item, number(), cluster_rank());
        }
    }
}

// A cluster's code is compiled for what is known of its first item. With items of several kinds, the
// code for clusters whose first item is computed, NVFP4, is that of a kernel without others.
KERNEL void CLUSTERS_OF(PARTS) __launch_bounds__(THREADS, WARPS == 4 ? 3 : 2)
linear(const u8* __restrict__ packed, const float* __restrict__ scales, const u8* slabs,
       const float* x_squares, const u16* residual, const u64* __restrict__ outputs,
       float* y_squares, u16* y_slabs, const void* __restrict__ next_weight,
       const int4* __restrict__ items, const int2* __restrict__ strips, int most_items, int loaded,
       int first_tiles, int row_count, float eps, float next_offset,
       const u8* __restrict__ next_packed, const int2* __restrict__ next_first, int next_count) {
    DYNAMIC_SHARED(memory);
    let_next_start();
    const int cluster = blockIdx.x / PARTS, rows = FULL ? ROWS : row_count;
    const saddr row_scales = shared_address(memory) + SCALES_AT;
    const Results to = {outputs,    scales,      strips, residual, y_squares, y_slabs, next_weight,
                        row_scales, next_offset, rows};
    const Params params = {packed,     slabs, x_squares, to, items, most_items, {loaded, first_tiles},
                         eps, {next_packed, next_first, next_count}};
    if (LOADED == NO_CLUSTER || (LOADED == SOME_CLUSTERS && cluster >= loaded)) {
        run(memory, params, cluster, Computed());
    } else {
        run(memory, params, cluster, Loaded{entry_now(items + cluster * most_items * 2)});
    }
}
