// rows x packed weight -> rows, for up to 32 rows: bound by reading the weight, once.
//
// Columns are dealt to clusters of blocks, K to the blocks of a cluster, slots of K to the warps of
// a block. Weights and rows come by the copy engine, asked for by a warp that does nothing else
// (ring.cuh); the others never wait for each other. Two blocks share a multiprocessor, or three with
// half of the warps, and a block of the next kernel moves in where one has left. At the end of an
// item, up to 256 columns, warps send their sums to the block of the cluster that adds them in order
// of k (finish.cuh). No sum depends on who is first.
//
// An item may have a narrow tile: each warp multiplies 16 of K of one of its slots with each of its
// own, so that the item is a sixteenth longer for all warps and not a quarter for two.
//
// The rows are what enters the product: a norm over the whole row is, but for the row's factor,
// applied by whoever made the rows (y_slabs); that factor comes from x_squares at the end.
//
// Compile-time: WARPS; ROW_TILES; KINDS; ROW_SCALE, whether x_squares is given; PARTS; NARROW; and
// see finish.cuh.
#include "cuda/ahead.cuh"
#include "linear/finish.cuh"

constexpr int THREADS = 32 * (WARPS + 1);
constexpr int ROOM_AT = STAGES * STAGE_BYTES;
constexpr int BARRIERS_AT = ROOM_AT + ROOM_BYTES;
constexpr int SCALES_AT = BARRIERS_AT + 8 * (2 * STAGES + 3);
constexpr int STAGED_AT = BARRIERS_AT + 256;
static_assert(SCALES_AT + 4 * ROWS <= STAGED_AT, "barriers and row scales fit");

// Where no row will ever be, zeros.
DEVICE void clear_rows(u8* memory, int rows) {
    if (rows == ROWS) return;
    constexpr int EACH = STAGE_SLABS * ROWS * SLAB_ROW / 16;
#pragma unroll 1
    for (int i = threadIdx.x; i < STAGES * EACH; i += THREADS) {
        reinterpret_cast<uint4*>(memory + i / EACH * STAGE_BYTES + ROWS_AT)[i % EACH] =
            make_uint4(0, 0, 0, 0);
    }
    barrier_init_done();
}

// The warp that asks: the first stages' weights, their rows as soon as they are there, then a stage
// whenever one has been read. What to ask for is known before each wait. The row scales, which only
// the end of an item needs, come when the first item has been asked for.
DEVICE void ask(const Source& source, Turn turn, Walk at, const float* x_squares, float* scales,
                saddr scales_made, int k, float eps, const Following& following) {
    Turn turn_again = turn;
    const int first_item = at.at;
    Wish rows[STAGES];
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
        rows[i].row_bytes = 0;
        if (at.over) continue;
        rows[i] = source.wish(at);
        source.ask_weights(rows[i], turn);
        at.next();
        turn.next();
    }
    Wish next;
    if (!at.over) next = source.wish(at);
    following.fetch();
    cluster_wait();
    wait_for_previous();
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
        source.ask_rows(rows[i], turn_again);
        turn_again.next();
    }
    bool scaled = !ROW_SCALE;
#pragma unroll 1
    for (;;) {
        if (!scaled && (at.over || at.at != first_item)) {
            row_scales(scales, x_squares, k, eps);
            barrier_arrive(scales_made);
            scaled = true;
        }
        if (at.over) return;
        barrier_wait(turn.read(), turn.parity ^ 1);
        source.ask_weights(next, turn);
        source.ask_rows(next, turn);
        turn.next();
        at.next();
        if (!at.over) next = source.wish(at);
    }
}

// A warp that multiplies, in one item: stages of the block, of which slots `phase`.. are its own.
struct Reader {
    Turn& turn;
    u32 slot_at, row_at;  // in a stage: of the warp's first slot, of the lane's row
    int end, phases;
    Part part;

    DEVICE saddr slot() const { return turn.bytes() + slot_at; }
    DEVICE saddr slab(int i) const { return turn.bytes() + row_at + i * ROWS * SLAB_ROW; }
    DEVICE void wait() const { barrier_wait(turn.filled(), turn.parity); }
    // This lane has read the stage; `last`: of its last loads. Every lane arrives for itself: it costs
    // nothing measurable, and racecheck knows of no lane that speaks for others.
    DEVICE void next(u32 last) const {
        received(last);
        barrier_arrive(turn.read());
        turn.next();
    }

    // `q`, here and below: the first slot of a stage. From there on, stages in which the warp has no
    // slot.
    DEVICE void skip(int q) const {
#pragma unroll 1
        for (; q < end; q += phases) {
            wait();
            next(0);
        }
    }

    // The warp's part of a narrow slot beside its own slot `i` of a stage: 16 of K of a row tile.
    DEVICE static int narrow_k16() { return threadIdx.x / 64; }
    DEVICE void load_narrow(Narrow& narrow, int i) const {
        narrow.load(turn.bytes() + NARROW_AT + (part.phase + i) * NARROW_SLOT,
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

    // To the warp's first slot of a stage, and its rows.
    DEVICE void enter(saddr& at, saddr& rows) const {
        wait();
        at = slot();
        rows = slab(part.phase);
    }
    // Adds the first three 16 of K of a slot and loads the fourth.
    DEVICE void three(Nvfp4& now, Nvfp4& ahead, Sums& sums, saddr at, saddr rows) const {
#pragma unroll
        for (int k16 = 0; k16 < 3; k16++) {
            ahead.load(at, rows, k16 + 1, part.side);
            now.add(sums, k16);
            now.follow(ahead);
        }
    }
    // Adds the fourth, once the loads of the next slot's first (`at`, `rows`) are under way.
    DEVICE void fourth(Nvfp4& now, Nvfp4& ahead, Sums& sums, saddr at, saddr rows) const {
        ahead.load_scales(at);
        ahead.load(at, rows, 0, part.side);
        now.add(sums, 3);
        now = ahead;
    }
    // A slot's slab is the stage's of the same number.
    DEVICE void nvfp4(Sums& sums, int q) const {
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
        }
        now.add(sums, 3);
        skip(q);
    }
    // The same in a kernel with narrow tiles, of an item with one or without. One loop goes over stages
    // and their slots: a loop in a loop would take more registers than there are.
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
            three(now, ahead, sums, at, rows);
            const bool second = SPLIT > 1 && at == slot() && q + part.phase + 1 < end;
            if (WITH_NARROW) {
                load_narrow(narrow, SPLIT > 1 && at != slot());
                received(now.last());
                narrow.add(narrow_sums, narrow_k16());
            }
            if (second) {
                at += SLOT;
                rows += ROWS * SLAB_ROW;
            } else {
                next(WITH_NARROW ? narrow.last() : now.last());
                q += phases;
                if (q + part.phase >= end) break;
                enter(at, rows);
            }
            fourth(now, ahead, sums, at, rows);
        }
        now.add(sums, 3);
        skip(q);
    }

    // Half a step has two of these slots or more.
    DEVICE void others(Sums& sums, int q, const Item& item) const {
        const int sixteens = item.columns() / 16;
        for (; q + part.phase < end; q += phases) {
            wait();
#pragma unroll 1
            for (int i = 0; i < SPLIT; i++) {
                const int own = q + part.phase + i;
                // Of the stage's slabs, and of the slab's K.
                const int at = own * sixteens / 4 - q * sixteens / 4;
                add_slot(sums, slot() + i * SLOT, slab(at), own * sixteens % 4, item, part.side);
            }
            next(last_of(sums));
        }
        skip(q);
    }
};

// items: [clusters, most_items, 2].
KERNEL void __launch_bounds__(THREADS, WARPS == 4 ? 3 : 2)
linear(const u8* __restrict__ packed, const float* __restrict__ scales, const u8* slabs,
       const float* x_squares, const u16* residual, const u64* __restrict__ outputs,
       float* y_squares, u16* y_slabs, const void* __restrict__ next_weight,
       const int4* __restrict__ items, const int2* __restrict__ strips, int most_items,
       int row_count, int k, float eps, float next_offset, const u8* __restrict__ next_packed,
       const int2* __restrict__ next_first, int next_count) {
    DYNAMIC_SHARED(memory);
    let_next_start();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int rank = cluster_rank(), steps = (k + STEP_K - 1) / STEP_K;
    const saddr barriers = shared_address(memory + BARRIERS_AT);
    Turn turn;
    turn.start(shared_address(memory), barriers);
    Room room = {shared_address(memory + ROOM_AT), barriers + 16 * STAGES,
                 barriers + 16 * STAGES + 8, 0};
    const saddr scales_made = barriers + 16 * STAGES + 16;
    Walk at;
    at.table = items;
    at.at = blockIdx.x / PARTS * most_items * 2;
    at.halves = halves_of(k, steps * rank / PARTS, steps * (rank + 1) / PARTS);
    at.start();
    clear_rows(memory, row_count);
    if (warp == WARPS && lane == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(turn.full + 8 * i, 1);
            barrier_init(turn.empty + 8 * i, 32 * WARPS);
        }
        barrier_init(room.arrived, 1);
        barrier_init(room.free, MOST_HALVES * ROW_TILES + NARROW * OCTETS);
        barrier_init(scales_made, 32);
        barrier_init_done();
    }
    sync_warp();
    if (row_count != ROWS) sync_block();  // the cluster's meeting shows barriers, not memory
    cluster_arrive_relaxed();
    if (warp == WARPS) {
        if (lane == 0) room.expect(at.item, rank);
        ask({packed, slabs, row_count}, turn, at, x_squares,
            reinterpret_cast<float*>(memory + SCALES_AT), scales_made, k, eps,
            {next_packed, next_first, next_count});
        return;
    }
    const saddr scales_at = shared_address(memory) + SCALES_AT;
    const Results to = {outputs,  scales,      strips,       residual,    y_squares,
                        y_slabs,  next_weight, scales_at, next_offset, row_count};
    const saddr staged = shared_address(memory) + STAGED_AT + warp * STAGED_BYTES;
    Share(at.item, rank).stage(staged, to, at.item);
    cluster_wait();
    wait_for_previous();
    const u32 row_at = ROWS_AT + lane % 16 * SLAB_ROW + (lane % 8 ^ lane / 16) * 16;
    for (bool first = true;; first = false) {
        const Item item = at.item;
        const Part part(item, warp);
        const bool active = part.of(item) && at.q + part.phase < at.end;
        const u32 slot_at = item.slot_at(part.tile, part.phase);
        const Reader reader = {turn, slot_at, row_at, at.end, item.phases(), part};
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
            reader.nvfp4(sums, at.q);
        } else {
            reader.others(sums, at.q, item);
        }
        // Asked for anew: in a register throughout the loop, it would cost the loop one.
        finish(sums, narrow_sums, room, scales_made, to, item, staged, cluster_rank(), first);
        if (item.left == 0) return;
        at.at += 2;
        at.open();
        sync_warp();  // all lanes have read what was staged
        Share(at.item, cluster_rank()).stage(staged, to, at.item);
        if (threadIdx.x == 0) {
            barrier_wait_cluster(room.arrived, room.parity ^ 1);
            room.expect(at.item, rank);
        }
    }
}
