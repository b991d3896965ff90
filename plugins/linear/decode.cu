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
constexpr int ROOM_AT = STAGES * STAGE_BYTES;
constexpr int BARRIERS_AT = ROOM_AT + ROOM_BYTES;
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
DEVICE void init_barriers(const Turn& turn, const Room& room, saddr scales_made, saddr early) {
    for (int i = 0; i < STAGES; i++) {
        barrier_init(turn.full + 8 * i, 1);
        barrier_init(turn.empty + 8 * i, 32 * WARPS);
        if (PACED) barrier_init(early + 8 * i, 1);
    }
    barrier_init(room.arrived, 1);
    barrier_init(room.free, Room::READERS);
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
DEVICE void ask(const Source& source, Turn turn, Walk at, saddr early, const Scaling& scaling,
                const Following& following, const Room& room) {
    Turn turn_again = turn, first_turn = turn;
    Walk again = at;
    const int first = at.at;
    int asked = 0;
    Ahead ahead = {source, turn, at, {}, false};
#pragma unroll 1
    for (; asked < STAGES && !ahead.at.over; asked++) {
        ahead.prepare();
        if (PACED && asked >= ON_THE_WAY) barrier_wait(early + 8 * (asked - ON_THE_WAY), 0);
        const saddr barrier = PACED ? early + 8 * asked : ahead.turn.filled();
        source.announce(barrier, ahead.wish.all_weights + (PACED ? 0 : ahead.wish.all_rows));
        source.ask_weights(ahead.wish, ahead.turn, barrier);
        ahead.pass();
    }
    if (threadIdx.x % 32 == 0) room.expect(at.item, 0, cluster_rank());
    following.fetch();
    Wish rows;
    if (!again.over) rows = source.rows_of(again);
    cluster_wait();
    wait_for_previous();
#pragma unroll 1
    for (int i = 0; i < asked; i++) {
        if (i > 0) rows = source.rows_of(again);
        if (PACED) source.announce_part(turn_again.filled(), rows.all_rows);
        source.ask_rows(rows, turn_again);
        again.next();
        turn_again.next();
    }
#pragma unroll 1
    for (int i = 0; PACED && i < asked; i++) {
        barrier_wait(early + 8 * i, 0);
        if (threadIdx.x % 32 == 0) barrier_arrive(first_turn.filled());
        first_turn.next();
    }
    Turn before = turn;  // ON_THE_WAY stages before the next one to request
    before.next();
    if (HEAD_SCALE) scaling.make();
    bool scaled = !ROW_SCALE;
#pragma unroll 1
    for (;;) {
        if (!scaled && (ahead.at.over || MANY && ahead.at.at != first)) {
            scaling.make();
            scaled = true;
        }
        if (ahead.at.over) return;
        ahead.prepare();
        if (PACED) {
            barrier_wait(before.filled(), before.parity);
            before.next();
        }
        const saddr filled = ahead.turn.filled();
        barrier_wait(ahead.turn.read(), ahead.turn.parity ^ 1);
        source.announce(filled, ahead.wish.all_weights + ahead.wish.all_rows);
        source.ask_weights(ahead.wish, ahead.turn, filled);
        source.ask_rows(ahead.wish, ahead.turn);
        ahead.pass();
    }
}

// What a block is given: the kernel's arguments, as in few.py. items: [clusters, most_items, 2].
struct Given {
    const u8* packed;
    const u8* slabs;
    const float* x_squares;
    Results to;
    const int4* items;
    int most_items;
    FirstItems first_items;
    float eps;
    Following following;
};

// Where a block gets its cluster's first item.
struct Computed {
    DEVICE Entry operator()(const Given& given, int cluster) const {
        return given.first_items.entry(cluster);
    }
};
struct Loaded {
    Entry entry;  // on its way while the barriers are initialised
    DEVICE Entry operator()(const Given&, int) const { return entry; }
};

template <class First>
DEVICE void run(u8* memory, const Given& given, int cluster, const First& first_entry) {
    const int rows = given.to.rows;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int rank = cluster_rank();
    Walk at;
    at.table = given.items;
    at.at = cluster * given.most_items * 2;
    at.halves = halves_of(rank);
    const saddr barriers = shared_address(memory + BARRIERS_AT);
    Turn turn;
    turn.start(shared_address(memory), barriers);
    Room room = {shared_address(memory + ROOM_AT), barriers + 16 * STAGES,
                 barriers + 16 * STAGES + 8};
    const saddr scales_made = barriers + 16 * STAGES + 16, early = scales_made + 8;
    constexpr int MADE_AT = HEAD_SCALE ? FACTORS_AT : SCALES_AT;
    clear_rows(memory, rows);
    if (warp == WARPS && lane == 0) init_barriers(turn, room, scales_made, early);
    if (!FULL) sync_block();  // the relaxed cluster barrier publishes no memory writes
    cluster_arrive_relaxed();
    if (warp == WARPS) {
        at.start(first_entry(given, cluster));
        const int first_head = HEAD_SCALE ? at.halves.begin / 2 : 0;
        ask({given.packed, given.slabs, rows}, turn, at, early,
            {given.x_squares + first_head * HEAD_ROWS * HEAD_PIECES,
             reinterpret_cast<float*>(memory + MADE_AT), scales_made, given.eps,
             at.halves.steps()},
            given.following, room);
        return;
    }
    at.start(first_entry(given, cluster));  // here, without what only the producer needs
    const Results& to = given.to;
    const saddr staged = shared_address(memory) + STAGED_AT + warp * STAGED_BYTES;
    Share(at.item, rank).stage(staged, to, at.item);
    cluster_wait();
    wait_for_previous();
    const u32 row_at = ROWS_AT + lane % 16 * SLAB_ROW + (lane % 8 ^ lane / 16) * 16;
    const saddr made = shared_address(memory) + MADE_AT;
    // Of the current item among those of the cluster.
    const auto number = [&] { return MANY ? at.at / 2 - cluster * given.most_items : 0; };
    for (;;) {
        const Item item = at.item;
        const Part part(item, warp);
        const bool active = part.of(item) && at.q + part.phase < at.end;
        const u32 slot_at = item.slot_at(part.tile, part.phase);
        const Reader reader = {turn, slot_at, row_at, at.end, item.phases(), part};
        Heads heads(made, scales_made);
        Sums sums;
        NarrowSums narrow_sums;
        clear(sums);
        clear_narrow(narrow_sums);
        if (item.narrow.there()) {
            if (active) {
                reader.nvfp4_narrow<true>(sums, narrow_sums, at.q);
            } else {
                reader.only_narrow(narrow_sums, at.q);
            }
        } else if (!active) {
            reader.skip(at.q);
        } else if (NARROW) {
            reader.nvfp4_narrow<false>(sums, narrow_sums, at.q);
        } else if (ONLY_NVFP4 || (KINDS & 1 << NVFP4 && item.kind == NVFP4)) {
            reader.nvfp4(sums, at.q, heads);
        } else {
            reader.others(sums, at.q, item);
        }
        // Known again from `at` and cluster_rank(): kept across the loop, these would occupy registers.
        finish(sums, narrow_sums, room, scales_made, to, item, staged, number(), cluster_rank());
        if (!MANY || item.left == 0) return;
        at.at += 2;
        at.open();
        sync_warp();  // all lanes have read the staged data, which is overwritten now
        Share(at.item, cluster_rank()).stage(staged, to, at.item);
        if (threadIdx.x == 0) {
            barrier_wait_cluster(room.arrived, Room::parity_before(number()));
            room.expect(at.item, number(), cluster_rank());
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
    const Given given = {packed,     slabs, x_squares, to, items, most_items, {loaded, first_tiles},
                         eps, {next_packed, next_first, next_count}};
    if (LOADED == NO_CLUSTER || (LOADED == SOME_CLUSTERS && cluster >= loaded)) {
        run(memory, given, cluster, Computed());
    } else {
        run(memory, given, cluster, Loaded{entry_now(items + cluster * most_items * 2)});
    }
}
