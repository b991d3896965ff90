// gdn of a block to verify, in one launch: fold the accepted records, write the state back, run the
// rows, leave their records.
//
// A block of threads works for HEADS value heads of one key head, SLAB columns of each. Half of its
// warps, the makers, convolve and normalise the rows into shared memory, four rows at a time. The
// others, the walkers, have the state in registers and walk the rows behind them: four columns of
// each head a warp; lane 4r + c holds rows 32i + 4r + j, i, j < 4, of column c of every head. So what
// a lane reads of q and k serves HEADS columns, as many sums are under way at once, and a sum over
// rows is three shuffles.
//
// Nothing but the rows themselves comes from the kernel before this one. State, records, tail and
// the count of accepted rows were written in an earlier step, and a step's first kernel starts only
// when the step before has ended and its control words are in place (a graph waits for the graph
// before it): they are read, and the fold is done, before wait_for_previous. Two blocks fit on a
// multiprocessor, so a launch folds while the one before it still walks its rows.
#include "gdn/block.cuh"

#ifndef SAVES_STATES
#error "SAVES_STATES must be defined"
#endif

constexpr int HELD = 16;         // rows of a column that a lane holds
constexpr int TILE = D * SLAB;   // floats of the state of a head and slab
constexpr int APART = THREADS / 4;  // rows of the state between two that a thread copies

typedef float State[HEADS][HELD];

// Shared memory.
struct Memory {
    float* tile;  // [HEADS][D][SLAB], fours of a row in tile_at's order
    Rows rows;
    Rows records;  // v: d; gates: the decays alone
    Raw raw;
};

DEVICE Memory memory_of(u8* memory, int rows, int held) {
    float* const tile = reinterpret_cast<float*>(memory);
    const Rows m = rows_at(tile + HEADS * TILE, rows);
    const Rows r = rows_at(m.gates + rows * GATES, held);
    return {tile, m, r, Raw{reinterpret_cast<u16*>(r.gates + held * GATES)}};
}

// Of four columns of a row in the tile: both a lane's rows and a row's fours in different banks.
DEVICE int tile_at(int row, int four) {
    return row / 2 * 32 + (((row % 2 * 4 + four) ^ (row / 4 % 8)) * 4);
}
static_assert(APART % 32 == 0, "tile_at(row + APART, four) = tile_at(row, four) + APART * SLAB");

// Of the block's part of the state, four columns of a row of its first head.
DEVICE i64 state_at(const Place& p, int row, int four) {
    return (static_cast<i64>(p.head) * D + row) * D + p.slab * SLAB + four * 4;
}

DEVICE void fetch_state(const float* tile, const Place& p, const float* state) {
    const int row = threadIdx.x / 4, four = threadIdx.x % 4;
    const float* const from = state + state_at(p, row, four);
    const saddr to = shared_address(tile + tile_at(row, four));
#pragma unroll
    for (int i = 0; i < HEADS * D / APART; i++)
        copy_async16(to + i * APART * SLAB * 4, from + i * APART * D);
}

// By the makers.
DEVICE void put_state(float* state, const float* tile, const Place& p) {
    constexpr int NEXT = 8 * MAKERS;
    const int row = threadIdx.x / 4 % NEXT, four = threadIdx.x % 4;
    float* const to = state + state_at(p, row, four);
    const float* const from = tile + tile_at(row, four);
#pragma unroll
    for (int i = 0; i < HEADS * D / NEXT; i++)
        *reinterpret_cast<float4*>(to + i * NEXT * D) =
            *reinterpret_cast<const float4*>(from + i * NEXT * SLAB);
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

DEVICE void row_part(float4 (&x)[HELD / 4], const float4* row, const Place& p) {
#pragma unroll
    for (int i = 0; i < HELD / 4; i++) x[i] = row[8 * i + p.lane / 4];
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
        const float* const column = column_of(m.v + t * COLUMNS, p);
#pragma unroll
        for (int h = 0; h < HEADS; h++)
            decay[h] = m.gates[t * GATES + h], d[h] = column[h * SLAB];
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
    for (int t = 0; t < n; t += 2) {
        other.load(m, p, min(t + 1, n - 1));
        fold_one(s, one);
        one.load(m, p, min(t + 2, n - 1));
        if (t + 1 < n) fold_one(s, other);
    }
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

    DEVICE void load_q(const Rows& m, const Place& p, int t) { row_part(q, m.q + t * FOURS, p); }
    DEVICE void load_k(const Rows& m, const Place& p, int t) { row_part(k, m.k + t * FOURS, p); }
    DEVICE void load_gates(const Rows& m, const Place& p, int t) {
        const float4* const gates = reinterpret_cast<const float4*>(m.gates + t * GATES);
        const float4 low = gates[0], high = gates[1];
        const float* const values = column_of(m.v + t * COLUMNS, p);
        const float decays[] = {low.x, low.y, low.z}, betas[] = {high.x, high.y, high.z};
#pragma unroll
        for (int h = 0; h < HEADS; h++)
            decay[h] = decays[h], beta[h] = betas[h], v[h] = values[h * SLAB];
        kq = low.w;
    }
};

// One row: the state moves on; d of every head, o of the lane's. Row `next` is asked for as soon as
// its place is free.
DEVICE float step(State& s, Row& row, const Rows& m, const Place& p, int next, float (&d)[HEADS]) {
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
    const float y = fma_rn(row.kq, pick(d, p), past);
    row.load_k(m, p, next);
    row.load_q(m, p, next);
    row.load_gates(m, p, next);
    return y;
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

// The walkers' part after the fold. MAKERS rows are there at every barrier.
DEVICE void walk(State& s, const Rows& m, const Place& p, int rows, u16* o, float* record_d,
                 float* states) {
    const bool mine = p.lane / 4 % 2 == 0 && p.lane / 8 < HEADS;
    int at = (p.head + min(p.lane / 8, HEADS - 1)) * D + p.slab * SLAB + 4 * p.warp + p.lane % 4;
    Row row;
    sync_block();
    row.load_q(m, p, 0);
    row.load_k(m, p, 0);
    row.load_gates(m, p, 0);
    // A row is asked for while the one before it is walked: so the barrier comes a row early.
    int t = 0;
    for (int end = MAKERS - 1;; end += MAKERS) {
        const int stop = end + 1 < rows ? end : rows;
#pragma unroll 1
        for (; t < stop; t++, at += WIDTH) {
            float d[HEADS];
            const float y = step(s, row, m, p, min(t + 1, rows - 1), d);
            if (mine) o[at] = float_bf16(y);
#if SAVES_STATES
            save_state(states + static_cast<i64>(t) * WIDTH * D, s, p);
#else
            if (mine) record_d[at] = pick(d, p);
#endif
        }
        if (stop == rows) break;
        sync_block();
    }
}

KERNEL void __launch_bounds__(THREADS, 2)
gdn_rows(const u16* qkv, const u16* b, const u16* a, const void* conv_weight, const void* a_log,
         const void* dt_bias, const i32* accepted, const float* state, const u16* tail,
         const u16* record_qkv, const float* record_k, const float* record_d,
         const float* record_decay, const float* states, u16* o, float* next_state, u16* next_tail,
         u16* next_record_qkv, float* next_record_k, float* next_record_d, float* next_record_decay,
         float* next_states, int rows, int held) {
    DYNAMIC_SHARED(dynamic);
    const Place p = place_of();
    const Memory m = memory_of(dynamic, rows, held);
    const int n = *accepted;
#if SAVES_STATES
    fetch_state(m.tile, p, n == 0 ? state : states + static_cast<i64>(n - 1) * WIDTH * D);
#else
    fetch_state(m.tile, p, state);
    fetch_records(m.records, p, record_k, record_d, record_decay, held);
#endif
    const Inputs x{qkv, tail, record_qkv, CHANNELS, n};
    const int maker = p.warp - WALKERS;
    if (maker >= 0 && maker < TAPS - 1) m.raw.fetch(p, x, maker - (TAPS - 1));
    copy_async_commit();
    if (maker >= 0) {
        const Maker make(p, conv_weight);
        copy_async_wait<0>();
        sync_block();
        wait_for_previous();
        let_next_start();
        for (int t = maker; t < rows; t += MAKERS) m.raw.fetch(p, x, t);
        copy_async_commit();
        copy_async_wait<0>();
        sync_some(2, 32 * MAKERS);
#pragma unroll 1
        for (int first = 0; first < rows; first += MAKERS) {
            if (first + maker < rows)
                make.row(m.rows, p, m.raw, first + maker, next_tail, next_record_qkv,
                         next_record_k);
            sync_block();
        }
        put_state(next_state, m.tile, p);
        return;
    }
    Gates gates(p, a_log, dt_bias);
    copy_async_wait<0>();
    sync_block();
    State s;
    take_state(s, m.tile, p);
    wait_for_previous();
    let_next_start();
    if (gates.mine(p, rows)) gates.load(a, b);
#if !SAVES_STATES
    fold(s, m.records, p, n);
    leave_state(s, m.tile, p);
#endif
    if (gates.mine(p, rows)) gates.put(m.rows, p, next_record_decay);
    walk(s, m.rows, p, rows, o, next_record_d, next_states);
}
