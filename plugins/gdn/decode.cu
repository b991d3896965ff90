// gdn of a verify, in one launch: folds the accepted records, writes the state back, runs the rows
// and stores their records.
//
// A thread block computes HEADS value heads of one key head, SLAB columns of each. Half of its
// warps, the makers, convolve and normalise the rows into shared memory, four rows at a time. The
// other half, the walkers, keep the state in registers and run the recurrence over these rows. A
// walker has four columns of each head; lane 4r + c holds rows 32i + 4r + j, i, j < 4, of column c
// of every head. So each q or k value that a lane reads is used for HEADS columns, HEADS
// independent sums are in flight, and a sum over rows takes three shuffles.
//
// All warps synchronise once, before any data is exchanged. After that each half synchronises only
// within itself, and the data that one half leaves in shared memory for the other has a barrier of
// its own. Makers run ahead through all rows; then they wait for the folded state and write it
// back. With NEXT, walkers leave o in the place of v, and makers finish and store it (epilogue.cuh).
//
// Only the rows (qkv, b, a) come from the previous kernel. State, records, tail and the number of
// accepted rows were written in an earlier step. A step's first kernel starts only when the
// previous step has ended and its control words are in place (a graph waits for the graph before
// it), so these are read, and the fold is done, before wait_for_previous.
//
// A block has a multiprocessor to itself if there are enough of them (launch.py); else two blocks
// share one. The next launch may start, and the next product's weight may be prefetched, only when
// this launch's rows have arrived: earlier reads would delay them. After that, memory is mostly
// idle.
#include "cuda/prefetch.cuh"
#include "gdn/epilogue.cuh"

#ifndef SAVES_STATES
#error "SAVES_STATES must be defined"
#endif

constexpr int HELD = 16;         // rows of a column that a lane holds
constexpr int TILE = D * SLAB;   // floats of the state of a head and slab

typedef float State[HEADS][HELD];

// Shared memory.
struct Memory {
    Barriers barriers;
    float* tile;  // [HEADS][D][SLAB], groups of four columns in tile_at's order
    Rows rows;
    Rows records;  // d is stored as v; of the gates only the decays
    Raw raw;
};

DEVICE Memory memory_of(u8* memory, int rows, int held) {
    float* const tile = reinterpret_cast<float*>(memory + Barriers::BYTES);
    const Rows m = {tile + HEADS * TILE}, r = {m.row(rows)};
    const Raw raw = {reinterpret_cast<u16*>(r.record(held))};
    return {{shared_address(memory)}, tile, m, r, raw};
}

// Offset in the tile of four columns of a row. The swizzle puts both the rows that a warp's lanes
// read and the groups of four of a row in different banks.
DEVICE int tile_at(int row, int four) {
    return row / 2 * 32 + (((row % 2 * 4 + four) ^ (row / 4 % 8)) * 4);
}
// Offset in the state of four of the block's columns, in a row of its first head.
DEVICE i64 state_at(const Place& p, int row, int four) {
    return (static_cast<i64>(p.head) * D + row) * D + p.slab * SLAB + four * 4;
}

// A thread copies four columns of every 32nd row; the tile's swizzle repeats after 32 rows.
constexpr int ROWS_AT_ONCE = 32;
static_assert(8 * WALKERS == ROWS_AT_ONCE && 8 * MAKERS == ROWS_AT_ONCE, "a thread four columns");

// Called by the walkers.
DEVICE void fetch_state(const float* tile, const Place& p, const float* state) {
    const int row = threadIdx.x / 4, four = threadIdx.x % 4;
    const saddr to = shared_address(tile + tile_at(row, four));
    const float* const from = state + state_at(p, row, four);
#pragma unroll
    for (int i = 0; i < HEADS * D; i += ROWS_AT_ONCE) copy_async16(to + i * SLAB * 4, from + i * D);
}

// Called by the makers.
DEVICE void put_state(float* state, const float* tile, const Place& p) {
    const int thread = threadIdx.x - 32 * WALKERS, row = thread / 4, four = thread % 4;
    const float* const from = tile + tile_at(row, four);
    float* const to = state + state_at(p, row, four);
#pragma unroll 8
    for (int i = 0; i < HEADS * D; i += ROWS_AT_ONCE)
        *reinterpret_cast<float4*>(to + i * D) = *reinterpret_cast<const float4*>(from + i * SLAB);
}

// A lane's element e of a head: row 32 (e / 4) + 4 (lane / 4) + e % 4.
DEVICE float& held(float* tile, const Place& p, int head, int e) {
    return tile[head * TILE + e / 4 * 32 * SLAB + tile_at(p.lane / 4 * 4 + e % 4, p.warp) +
                p.lane % 4];
}

DEVICE void take_state(State& s, float* tile, const Place& p) {
#pragma unroll
    for (int h = 0; h < HEADS; h++)
#pragma unroll
        for (int e = 0; e < HELD; e++) s[h][e] = held(tile, p, h, e);
}

DEVICE void leave_state(const State& s, float* tile, const Place& p) {
#pragma unroll
    for (int h = 0; h < HEADS; h++)
#pragma unroll
        for (int e = 0; e < HELD; e++) held(tile, p, h, e) = s[h][e];
}

// S <- decay S and S <- S + k d. Every change of the state goes through these two functions, so
// that folding a record gives the same bits as running the row.
DEVICE void decayed(float (&s)[HELD], float decay) {
#pragma unroll
    for (int e = 0; e < HELD; e++) s[e] = mul_rn(decay, s[e]);
}

DEVICE void added(float (&s)[HELD], const float4 (&k)[HELD / 4], float d) {
#pragma unroll
    for (int i = 0; i < HELD / 4; i++) {
        s[4 * i] = fma_rn(k[i].x, d, s[4 * i]);
        s[4 * i + 1] = fma_rn(k[i].y, d, s[4 * i + 1]);
        s[4 * i + 2] = fma_rn(k[i].z, d, s[4 * i + 2]);
        s[4 * i + 3] = fma_rn(k[i].w, d, s[4 * i + 3]);
    }
}

// A volatile load, which stays where it is written: the compiler would move others down to their
// use and wait there.
DEVICE float4 load_four(saddr from) {
    const uint4 x = load_shared16(from);
    return make_float4(bits_float(x.x), bits_float(x.y), bits_float(x.z), bits_float(x.w));
}

// The addresses at which a walker's lane reads a row or a record.
struct Cursor {
    saddr fours;       // the lane's part of k; its part of q is Rows::Q floats further
    saddr column;      // the lane's column of `head`, in v or d
    saddr gates, own;  // gates of all heads; gates of `head`

    DEVICE Cursor(const float* first, const Place& p, int head) {
        const saddr at = shared_address(first);
        fours = at + p.lane / 4 * 16;
        column = at + 4 * (Rows::V + head * SLAB + 4 * p.warp + p.lane % 4);
        gates = at + 4 * Rows::GATE;
        own = at + 4 * (Rows::GATE + head);
    }
    DEVICE void next(int pitch) {
        fours += 4 * pitch, column += 4 * pitch, gates += 4 * pitch, own += 4 * pitch;
    }
    DEVICE void load(float4 (&x)[HELD / 4], int from) const {
#pragma unroll
        for (int i = 0; i < HELD / 4; i++) x[i] = load_four(fours + 4 * from + 128 * i);
    }
    DEVICE void load_column(float (&x)[HEADS]) const {
#pragma unroll
        for (int h = 0; h < HEADS; h++) x[h] = bits_float(load_shared4(column + 4 * SLAB * h));
    }
    DEVICE float4 load_gates() const { return load_four(gates); }
};

// The lane's partial sum of S^T x for one column.
DEVICE float dot(const float (&s)[HELD], const float4 (&x)[HELD / 4]) {
    float a = mul_rn(s[0], x[0].x), b = mul_rn(s[1], x[0].y);
    a = fma_rn(s[2], x[0].z, a), b = fma_rn(s[3], x[0].w, b);
#pragma unroll
    for (int i = 1; i < HELD / 4; i++) {
        a = fma_rn(s[4 * i], x[i].x, a), b = fma_rn(s[4 * i + 1], x[i].y, b);
        a = fma_rn(s[4 * i + 2], x[i].z, a), b = fma_rn(s[4 * i + 3], x[i].w, b);
    }
    return add_rn(a, b);
}

#if !SAVES_STATES
// Starts copying all `held` records into shared memory; how many were accepted is not known yet.
DEVICE void fetch_records(const Rows& m, const Place& p, const float* k, const float* d,
                          const float* decay, int held) {
#pragma unroll 1
    for (int t = p.warp; t < held; t += WALKERS + MAKERS) {
        const saddr to = shared_address(m.record(t)) + p.lane * 16;
        copy_async16(to + 4 * Rows::K, k + (t * KEY_HEADS + p.key_head) * D + p.lane * 4);
        if (p.lane < COLUMNS / 4)
            copy_async16(to + 4 * Rows::V, d + t * WIDTH + p.value_four(p.lane));
    }
    if (p.warp < HEADS && p.lane < held)
        m.record(p.lane)[Rows::GATE + p.warp] = decay[p.lane * VALUE_HEADS + p.head + p.warp];
}

// A walker's values of a record.
struct Record {
    float4 k[HELD / 4];
    float decay[HEADS], d[HEADS];

    DEVICE void load(const Cursor& at) {
        at.load(k, Rows::K);
        const float4 gates = at.load_gates();
        const float decays[] = {gates.x, gates.y, gates.z};
#pragma unroll
        for (int h = 0; h < HEADS; h++) decay[h] = decays[h];
        at.load_column(d);
    }
};

DEVICE void fold_one(State& s, const Record& x) {
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        decayed(s[h], x.decay[h]);
        added(s[h], x.k, x.d[h]);
    }
}

// Folds n records into the state, loading each one while the previous one is folded.
DEVICE void fold(State& s, const Rows& m, const Place& p, int n) {
    if (n == 0) return;
    Cursor at(m.first, p, 0);
    Record one, other;
    one.load(at);
#pragma unroll 1
    for (int t = 1; t < n; t += 2) {
        at.next(Rows::RECORD_PITCH);
        other.load(at);
        fold_one(s, one);
        if (t + 1 < n) at.next(Rows::RECORD_PITCH);
        one.load(at);
        fold_one(s, other);
    }
    if (n % 2) fold_one(s, one);
}
#endif

// Sums each head's value over the lanes of a column. Only the head's own lanes (lane / 8 is the
// head) receive its sum.
DEVICE float sum_of_head(const float (&x)[HEADS], const Place& p) {
    const bool upper = p.lane & 16, odd = p.lane & 8;
    const float first = x[0], middle = x[HEADS > 1], last = x[HEADS == 3 ? 2 : 0];
    const float a = add_rn(upper ? last : first, shuffle_xor(upper ? first : last, 16));
    const float b = add_rn(middle, shuffle_xor(middle, 16));
    const float sum = add_rn(odd ? b : a, shuffle_xor(odd ? a : b, 8));
    return add_rn(sum, shuffle_xor(sum, 4));
}

// A walker's values of a row.
struct Row {
    float4 q[HELD / 4], k[HELD / 4];
    float decay[HEADS], kq;
    float own_decay, beta, v;  // of the lane's head

    DEVICE void load(const Cursor& at) {
        at.load(k, Rows::K);
        at.load(q, Rows::Q);
        const float4 gates = at.load_gates();
        const float decays[] = {gates.x, gates.y, gates.z};
#pragma unroll
        for (int h = 0; h < HEADS; h++) decay[h] = decays[h];
        kq = gates.w;
        own_decay = bits_float(load_shared4(at.own));
        beta = bits_float(load_shared4(at.own + 16));
        v = bits_float(load_shared4(at.column));
    }
};

// Runs one row: updates the state, sets d and returns o, both of the lane's head.
DEVICE float step(State& s, const Row& row, const Place& p, float& d) {
    float in_k[HEADS], in_q[HEADS];
    // Both sums use the state before its decay, so that the decay can be applied while they are
    // reduced over the lanes: o = (decay S + k d)^T q = decay S^T q + (k . q) d. Each lane computes
    // d and o of one head only. The schedulers are bound by instruction issue, not by latency, so
    // fewer instructions are worth one more shuffle.
#pragma unroll
    for (int h = 0; h < HEADS; h++) in_k[h] = dot(s[h], row.k);
    d = mul_rn(row.beta, fma_rn(-row.own_decay, sum_of_head(in_k, p), row.v));
#pragma unroll
    for (int h = 0; h < HEADS; h++) in_q[h] = dot(s[h], row.q);
#pragma unroll
    for (int h = 0; h < HEADS; h++) decayed(s[h], row.decay[h]);
    const float past = mul_rn(row.own_decay, sum_of_head(in_q, p));
#pragma unroll
    for (int h = 0; h < HEADS; h++) added(s[h], row.k, shuffle(d, 8 * h + p.lane % 4));
    return fma_rn(row.kq, d, past);
}

#if SAVES_STATES
DEVICE void save_state(float* state, const State& s, const Place& p) {
#pragma unroll
    for (int h = 0; h < HEADS; h++)
#pragma unroll
        for (int e = 0; e < HELD; e++)
            state[((p.head + h) * D + e / 4 * 32 + p.lane / 4 * 4 + e % 4) * D + p.slab * SLAB +
                  4 * p.warp + p.lane % 4] = s[h][e];
}
#endif

// Where a walker's lane stores the results of a row and of the next one.
struct Left {
    u16* o;
    float *record_d, *states;
    float* walked;  // NEXT: o in shared memory, for the makers, in the place of v
    bool mine;  // whether the lane stores: one of those that have the same head's results does

    DEVICE Left(const Place& p, const Rows& rows, u16* o_, float* d, float* states_)
        : states(states_) {
        const int head = min(p.lane / 8, HEADS - 1), column = 4 * p.warp + p.lane % 4;
        const int at = (p.head + head) * D + p.slab * SLAB + column;
        o = o_ + at, record_d = d + at, mine = p.lane / 4 % 2 == 0 && p.lane / 8 < HEADS;
        walked = rows.first + Rows::V + head * SLAB + column;
    }
    // `i`: 0 for the current row, 1 for the next one.
    DEVICE void step_and_put(State& s, const Row& row, const Place& p, int i) const {
        float d;
        const float y = step(s, row, p, d);
        if (mine && NEXT) walked[i * Rows::PITCH] = y;
        if (mine && !NEXT) o[i * WIDTH] = float_bf16(y);
#if SAVES_STATES
        save_state(states + i * WIDTH * D, s, p);
#else
        if (mine) record_d[i * WIDTH] = d;
#endif
    }
    DEVICE void next_two() {
        o += 2 * WIDTH, record_d += 2 * WIDTH, states += 2 * WIDTH * D;
        walked += 2 * Rows::PITCH;
    }
};

// The walkers' part after the fold. Waits for each group of MAKERS rows, and loads each row while
// the previous one is run.
DEVICE void walk(State& s, const Memory& m, const Place& p, int rows, Left left) {
    static_assert(MAKERS % 2 == 0, "two rows a turn");
    Row one, other;
    Cursor at(m.rows.first, p, min(p.lane / 8, HEADS - 1));
    // Only lanes that store need v, and another must not load what they overwrite.
    if (NEXT && !left.mine) at.column = at.gates;
    Barriers::wait(m.barriers.made(0));
    let_next_start();
    one.load(at);
#pragma unroll 1
    for (int t = 1; t < rows; t += 2) {
        at.next(Rows::PITCH);
        other.load(at);
        left.step_and_put(s, one, p, 0);
        if ((t + 1) % MAKERS == 0 && t + 1 < rows) Barriers::wait(m.barriers.made(t + 1));
        if (t + 1 < rows) at.next(Rows::PITCH);
        one.load(at);
        left.step_and_put(s, other, p, 1);
        left.next_two();
        if (NEXT && ((t + 1) % MAKERS == 0 || t + 1 == rows)) barrier_arrive(m.barriers.walked(t));
    }
    if (rows % 2) {
        left.step_and_put(s, one, p, 0);
        if (NEXT) barrier_arrive(m.barriers.walked(rows - 1));
    }
}

// Saving the state after every row takes more registers; that launch is bound by its stores anyway.
KERNEL void __launch_bounds__(THREADS, SAVES_STATES ? 1 : 2)
gdn_rows(const u16* qkv, const u16* b, const u16* a, const void* conv_weight, const void* a_log,
         const void* dt_bias, const i32* accepted, const float* state, const u16* tail,
         const u16* record_qkv, const float* record_k, const float* record_d,
         const float* record_decay, const float* states, u16* o, float* next_state, u16* next_tail,
         u16* next_record_qkv, float* next_record_k, float* next_record_d, float* next_record_decay,
         float* next_states, const u16* next_gate, const void* next_norm_weight, u16* y_slabs,
         float* y_squares, const i64* tail_shift, const i64* record_shift, const u8* next_packed,
         int next_share, int rows, int held, float next_offset) {
    DYNAMIC_SHARED(dynamic);
    const Place p = place_of();
    const Memory m = memory_of(dynamic, rows, SAVES_STATES ? 0 : held);
    const int n = *accepted;
    const i64 tail_by = shift_of(tail_shift), record_by = shift_of(record_shift);
#if !SAVES_STATES
    if (p.warp < WALKERS) fetch_state(m.tile, p, state);  // while n and the shifts are loading
#endif
    move(tail, tail_by), move(next_tail, -tail_by);
    move(record_qkv, record_by), move(next_record_qkv, -record_by);
#if SAVES_STATES
    move(states, record_by), move(next_states, -record_by);
    if (n > 0) state = states + static_cast<i64>(n - 1) * WIDTH * D;
    if (p.warp < WALKERS) fetch_state(m.tile, p, state);
#else
    move(record_k, record_by), move(next_record_k, -record_by);
    move(record_d, record_by), move(next_record_d, -record_by);
    move(record_decay, record_by), move(next_record_decay, -record_by);
    fetch_records(m.records, p, record_k, record_d, record_decay, held);
#endif
    const Inputs x{qkv, tail, record_qkv, CHANNELS, n};
    const int maker = p.warp - WALKERS;
    const Feed feed(p, m.raw);
    if (maker >= 0)
        for (int t = maker - (TAPS - 1); t < 0; t += MAKERS) feed.fetch(x.row(t), t);
    copy_async_commit();
    if (threadIdx.x == 0) m.barriers.init();
    sync_block();
    if (maker >= 0) {
        const Maker make(p, conv_weight);
#if NEXT
        const Next next = {next_gate, next_norm_weight, y_slabs, y_squares, next_offset};
        Finish finish(p, next);
#endif
        copy_async_wait<0>();
        barrier_arrive(m.barriers.fetched());
        wait_for_previous();
        for (int t = maker; t < rows; t += MAKERS) feed.fetch(x.rows + t * CHANNELS, t);
        copy_async_commit();
        copy_async_wait<0>();
        if (maker == 0 && p.lane == 0) fetch_ahead(next_packed, blockIdx.x, next_share);
        let_next_start();
        sync_some(2, 32 * MAKERS);
#pragma unroll 1
        for (int first = 0; first < rows; first += MAKERS) {
            if (first + maker < rows)
                make.row(m.rows, p, m.raw, first + maker, next_tail, next_record_qkv,
                         next_record_k);
            barrier_arrive(m.barriers.made(first));
        }
#if NEXT
        finish.start(next, rows);
#endif
        Barriers::wait(m.barriers.folded());
        put_state(next_state, m.tile, p);
#if NEXT
        finish.run(m.rows, p, m.barriers, next, o, rows);
#endif
        return;
    }
    Gates gates(p, a_log, dt_bias);
    copy_async_wait<0>();
    barrier_arrive(m.barriers.fetched());
    Barriers::wait(m.barriers.fetched());
    State s;
    take_state(s, m.tile, p);
#if !SAVES_STATES
    fold(s, m.records, p, n);
    leave_state(s, m.tile, p);
#endif
    barrier_arrive(m.barriers.folded());
    wait_for_previous();
    if (gates.mine(p, rows)) gates.load(a, b);
    if (gates.mine(p, rows)) gates.put(m.rows, p, next_record_decay);
    sync_some(1, 32 * WALKERS);  // every walker reads all gates
    walk(s, m, p, rows, Left(p, m.rows, o, next_record_d, next_states));
}
