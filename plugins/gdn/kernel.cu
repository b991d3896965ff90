// gdn of a block to verify, in one launch: fold the accepted records, write the state back, run the
// rows, leave their records.
//
// A block works for HEADS value heads of one key head, SLAB columns of each. Half of its warps, the
// makers, convolve and normalise the rows into shared memory, four rows at a time. The others, the
// walkers, have the state in registers and walk the rows behind them: four columns of each head a
// warp; lane 4r + c holds rows 32i + 4r + j, i, j < 4, of column c of every head. So what a lane
// reads of q and k serves HEADS columns, as many sums are under way at once, and a sum over rows is
// three shuffles.
//
// All warps meet once, before anything is handed over. From then on each half meets within itself
// alone, and what it leaves for the other in shared memory has a barrier of its own. Makers run
// ahead through all rows; at their end they wait for the folded state, which they write back.
//
// Nothing but the rows themselves comes from the kernel before this one. State, records, tail and
// the count of accepted rows were written in an earlier step, and a step's first kernel starts only
// when the step before has ended and its control words are in place (a graph waits for the graph
// before it): they are read, and the fold is done, before wait_for_previous.
//
// A block has a multiprocessor to itself where there are enough of them (launch.py); elsewhere two
// share one. The next launch may start, and the next product's weight be fetched ahead, only when this
// one's rows have come: earlier, what is read there would be on the way before them. From then on
// memory has little else to do.
#include "cuda/ahead.cuh"
#include "gdn/block.cuh"

#ifndef SAVES_STATES
#error "SAVES_STATES must be defined"
#endif

constexpr int HELD = 16;         // rows of a column that a lane holds
constexpr int TILE = D * SLAB;   // floats of the state of a head and slab

typedef float State[HEADS][HELD];

// Shared memory.
struct Memory {
    Barriers barriers;
    float* tile;  // [HEADS][D][SLAB], fours of a row in tile_at's order
    Rows rows;
    Rows records;  // v: d; gates: the decays alone
    Raw raw;
};

DEVICE Memory memory_of(u8* memory, int rows, int held) {
    float* const tile = reinterpret_cast<float*>(memory + Barriers::BYTES);
    const Rows m = rows_at(tile + HEADS * TILE, rows);
    const Rows r = rows_at(m.gates + rows * GATES, held);
    const Raw raw = {reinterpret_cast<u16*>(r.gates + held * GATES)};
    return {{shared_address(memory)}, tile, m, r, raw};
}

// Of four columns of a row in the tile: both a lane's rows and a row's fours in different banks.
DEVICE int tile_at(int row, int four) {
    return row / 2 * 32 + (((row % 2 * 4 + four) ^ (row / 4 % 8)) * 4);
}
// Of the block's part of the state, four columns of a row of its first head.
DEVICE i64 state_at(const Place& p, int row, int four) {
    return (static_cast<i64>(p.head) * D + row) * D + p.slab * SLAB + four * 4;
}

// Four columns of every 32nd row, from a thread's own on: the tile repeats itself.
constexpr int ROWS_AT_ONCE = 32;
static_assert(8 * WALKERS == ROWS_AT_ONCE && 8 * MAKERS == ROWS_AT_ONCE, "a thread four columns");

// By the walkers.
DEVICE void fetch_state(const float* tile, const Place& p, const float* state) {
    const int row = threadIdx.x / 4, four = threadIdx.x % 4;
    const saddr to = shared_address(tile + tile_at(row, four));
    const float* const from = state + state_at(p, row, four);
#pragma unroll
    for (int i = 0; i < HEADS * D; i += ROWS_AT_ONCE) copy_async16(to + i * SLAB * 4, from + i * D);
}

// By the makers.
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

// S <- decay S and S <- S + k d: these two and no others move a state, whoever calls.
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

// Where it stands: the compiler moves other loads down to their use, and waits for them there.
DEVICE float4 load_four(const void* from) {
    const uint4 x = load_shared16(shared_address(from));
    return make_float4(bits_float(x.x), bits_float(x.y), bits_float(x.z), bits_float(x.w));
}

DEVICE void row_part(float4 (&x)[HELD / 4], const float4* row, const Place& p) {
#pragma unroll
    for (int i = 0; i < HELD / 4; i++) x[i] = load_four(row + 8 * i + p.lane / 4);
}

// Of a row of v or d, this lane's column of the first head.
DEVICE const float* column_of(const float* row, const Place& p) {
    return row + 4 * p.warp + p.lane % 4;
}

// This lane's part of S^T x.
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
// The records on their way into shared memory, all that there are: how many count is not known yet.
DEVICE void fetch_records(const Rows& m, const Place& p, const float* k, const float* d,
                          const float* decay, int held) {
#pragma unroll 1
    for (int t = p.warp; t < held; t += WALKERS + MAKERS) {
        copy_async16(shared_address(m.k + t * FOURS + p.lane),
                     k + (t * KEY_HEADS + p.key_head) * D + p.lane * 4);
        if (p.lane < COLUMNS / 4)
            copy_async16(shared_address(m.v + t * COLUMNS + p.lane * 4),
                         d + t * WIDTH + p.value_four(p.lane));
    }
    if (p.warp < HEADS && p.lane < held)
        m.gates[p.lane * GATES + p.warp] = decay[p.lane * VALUE_HEADS + p.head + p.warp];
}

// What a walker needs of a record.
struct Record {
    float4 k[HELD / 4];
    float decay[HEADS], d[HEADS];

    DEVICE void load(const Rows& m, const Place& p, int t) {
        row_part(k, m.k + t * FOURS, p);
        const float4 gates = load_four(m.gates + t * GATES);
        const float decays[] = {gates.x, gates.y, gates.z};
        const float* const column = column_of(m.v + t * COLUMNS, p);
#pragma unroll
        for (int h = 0; h < HEADS; h++) decay[h] = decays[h], d[h] = column[h * SLAB];
    }
};

DEVICE void fold_one(State& s, const Record& x) {
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        decayed(s[h], x.decay[h]);
        added(s[h], x.k, x.d[h]);
    }
}

// n records into the state, each asked for while the one before it is folded.
DEVICE void fold(State& s, const Rows& m, const Place& p, int n) {
    if (n == 0) return;
    Record one, other;
    one.load(m, p, 0);
#pragma unroll 1
    for (int t = 1; t < n; t += 2) {
        other.load(m, p, t);
        fold_one(s, one);
        one.load(m, p, min(t + 1, n - 1));
        fold_one(s, other);
    }
    if (n % 2) fold_one(s, one);
}
#endif

// Over the lanes of a column, to all of them.
DEVICE float column_sum(float x) {
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) x = add_rn(x, shuffle_xor(x, mask));
    return x;
}

// Of each head's values the one of the head whose results a lane has after sum_of_head.
DEVICE float pick(const float (&x)[HEADS], const Place& p) {
    if (HEADS == 3 && p.lane / 8 == 2) return x[HEADS - 1];
    return p.lane / 8 % 2 ? x[HEADS > 1] : x[0];
}

// As column_sum, but each head's to the lanes of its own alone: lane / 8 is the head.
DEVICE float sum_of_head(const float (&x)[HEADS], const Place& p) {
    const bool upper = p.lane & 16, odd = p.lane & 8;
    const float first = x[0], middle = x[HEADS > 1], last = x[HEADS == 3 ? 2 : 0];
    const float a = add_rn(upper ? last : first, shuffle_xor(upper ? first : last, 16));
    const float b = add_rn(middle, shuffle_xor(middle, 16));
    const float sum = add_rn(odd ? b : a, shuffle_xor(odd ? a : b, 8));
    return add_rn(sum, shuffle_xor(sum, 4));
}

// What a walker needs of a row.
struct Row {
    float4 q[HELD / 4], k[HELD / 4];
    float decay[HEADS], beta[HEADS], v[HEADS], kq;

    DEVICE void load(const Rows& m, const Place& p, int t) {
        row_part(k, m.k + t * FOURS, p);
        row_part(q, m.q + t * FOURS, p);
        const float4 low = load_four(m.gates + t * GATES);
        const float4 high = load_four(m.gates + t * GATES + 4);
        const float* const values = column_of(m.v + t * COLUMNS, p);
        const float decays[] = {low.x, low.y, low.z}, betas[] = {high.x, high.y, high.z};
#pragma unroll
        for (int h = 0; h < HEADS; h++)
            decay[h] = decays[h], beta[h] = betas[h], v[h] = values[h * SLAB];
        kq = low.w;
    }
};

// One row: the state moves on; d of every head, o of the lane's.
DEVICE float step(State& s, const Row& row, const Place& p, float (&d)[HEADS]) {
    float in_k[HEADS], in_q[HEADS];
    // Both sums are of the state before its decay, which moves on while they cross the lanes:
    // o = (decay S + k d)^T q = decay S^T q + (k . q) d.
#pragma unroll
    for (int h = 0; h < HEADS; h++) in_k[h] = dot(s[h], row.k);
#pragma unroll
    for (int h = 0; h < HEADS; h++) in_k[h] = column_sum(in_k[h]);
#pragma unroll
    for (int h = 0; h < HEADS; h++) in_q[h] = dot(s[h], row.q);
#pragma unroll
    for (int h = 0; h < HEADS; h++) decayed(s[h], row.decay[h]);
    const float past = mul_rn(pick(row.decay, p), sum_of_head(in_q, p));
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        d[h] = mul_rn(row.beta[h], fma_rn(-row.decay[h], in_k[h], row.v[h]));
        added(s[h], row.k, d[h]);
    }
    return fma_rn(row.kq, pick(d, p), past);
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

// What the walkers leave of a row.
struct Left {
    u16* o;
    float *record_d, *states;
    bool mine;  // of the lanes that have a head's results, one writes
    int at;

    DEVICE void step_and_put(State& s, const Row& row, const Place& p, int t) const {
        float d[HEADS];
        const float y = step(s, row, p, d);
        if (mine) o[at + t * WIDTH] = float_bf16(y);
#if SAVES_STATES
        save_state(states + static_cast<i64>(t) * WIDTH * D, s, p);
#else
        if (mine) record_d[at + t * WIDTH] = pick(d, p);
#endif
    }
};

// The walkers' part after the fold: each turn of rows when it is made, each row asked for while the
// one before it is walked.
DEVICE void walk(State& s, const Memory& m, const Place& p, int rows, Left left) {
    static_assert(MAKERS % 2 == 0, "two rows a turn");
    left.mine = p.lane / 4 % 2 == 0 && p.lane / 8 < HEADS;
    left.at = (p.head + min(p.lane / 8, HEADS - 1)) * D + p.slab * SLAB + 4 * p.warp + p.lane % 4;
    Row one, other;
    Barriers::wait(m.barriers.made(0));
    let_next_start();
    one.load(m.rows, p, 0);
#pragma unroll 1
    for (int t = 1; t < rows; t += 2) {
        other.load(m.rows, p, t);
        left.step_and_put(s, one, p, t - 1);
        if ((t + 1) % MAKERS == 0 && t + 1 < rows) Barriers::wait(m.barriers.made(t + 1));
        one.load(m.rows, p, min(t + 1, rows - 1));
        left.step_and_put(s, other, p, t);
    }
    if (rows % 2) left.step_and_put(s, one, p, rows - 1);
}

// A state saved after every row takes more registers; that launch is bound by its stores.
KERNEL void __launch_bounds__(THREADS, SAVES_STATES ? 1 : 2)
gdn_rows(const u16* qkv, const u16* b, const u16* a, const void* conv_weight, const void* a_log,
         const void* dt_bias, const i32* accepted, const float* state, const u16* tail,
         const u16* record_qkv, const float* record_k, const float* record_d,
         const float* record_decay, const float* states, u16* o, float* next_state, u16* next_tail,
         u16* next_record_qkv, float* next_record_k, float* next_record_d, float* next_record_decay,
         float* next_states, const i64* tail_shift, const i64* record_shift, const u8* next_packed,
         int next_share, int rows, int held) {
    DYNAMIC_SHARED(dynamic);
    const Place p = place_of();
    const Memory m = memory_of(dynamic, rows, held);
    const int n = *accepted;
    const i64 tail_by = shift_of(tail_shift), record_by = shift_of(record_shift);
#if !SAVES_STATES
    if (p.warp < WALKERS) fetch_state(m.tile, p, state);  // while those three come
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
    if (maker >= 0)
        for (int t = maker - (TAPS - 1); t < 0; t += MAKERS) m.raw.fetch(p, x, t);
    copy_async_commit();
    if (threadIdx.x == 0) m.barriers.init();
    sync_block();
    if (maker >= 0) {
        const Maker make(p, conv_weight);
        copy_async_wait<0>();
        barrier_arrive(m.barriers.fetched());
        wait_for_previous();
        for (int t = maker; t < rows; t += MAKERS) m.raw.fetch(p, x, t);
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
        Barriers::wait(m.barriers.folded());
        put_state(next_state, m.tile, p);
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
    sync_some(1, 32 * WALKERS);  // each of them reads all gates
    walk(s, m, p, rows, Left{o, next_record_d, next_states, false, 0});
}
