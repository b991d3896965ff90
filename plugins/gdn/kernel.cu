// gdn of a block to verify, in one launch: fold the accepted records, write the state back, run the
// rows, leave their records.
//
// A block of four warps works for HEADS value heads of one key head, SLAB columns of each: q and k
// of its rows are convolved and normalised once, into shared memory, for all of them. A warp has
// four columns of each head; lane 4r + c holds rows 32i + 4r + j, i, j < 4, of column c of every
// head in registers, so what it reads of q and k serves HEADS columns, as many sums are under way
// at once, and a sum over rows is three shuffles.
//
// Nothing but the rows themselves comes from the kernel before this one. State, records, tail and
// the count of accepted rows were written in an earlier step, and a step's first kernel starts only
// when the step before has ended and its control words are in place (a graph waits for the graph
// before it): they are read, and the fold is done, before wait_for_previous. Two blocks fit on a
// multiprocessor, so a launch folds while the one before it still runs its rows.
#include "gdn/block.cuh"

#ifndef SAVES_STATES
#error "SAVES_STATES must be defined"
#endif

constexpr int HELD = 16;  // rows of a column that a lane holds

typedef float State[HEADS][HELD];

// Of four columns of a row in the tile: both a lane's rows and a row's fours in different banks.
DEVICE int tile_at(int row, int four) {
    return row / 2 * 32 + (((row % 2 * 4 + four) ^ (row / 4 % 8)) * 4);
}

// Floats from the state's first to what the tile's x-th four is of, and into the tile.
DEVICE i64 state_four(const Place& p, int x) {
    return (static_cast<i64>(p.head) * D + x / 4) * D + p.slab * SLAB + x % 4 * 4;
}
DEVICE int tile_four(int x) { return x / (D * 4) * TILE + tile_at(x / 4 % D, x % 4); }

DEVICE void fetch_state(const Rows& m, const Place& p, const float* state) {
#pragma unroll
    for (int i = 0; i < HEADS * TILE / 4 / THREADS; i++) {
        const int x = threadIdx.x + i * THREADS;
        copy_async16(shared_address(m.tile + tile_four(x)), state + state_four(p, x));
    }
}

DEVICE void put_state(float* state, const Rows& m, const Place& p) {
#pragma unroll
    for (int i = 0; i < HEADS * TILE / 4 / THREADS; i++) {
        const int x = threadIdx.x + i * THREADS;
        *reinterpret_cast<float4*>(state + state_four(p, x)) =
            *reinterpret_cast<const float4*>(m.tile + tile_four(x));
    }
}

DEVICE float& held(const Rows& m, const Place& p, int head, int e) {
    return m.tile[head * TILE + tile_at(e / 4 * 32 + 4 * p.r + e % 4, p.warp) + p.c];
}

DEVICE void take_state(State& s, const Rows& m, const Place& p) {
#pragma unroll
    for (int h = 0; h < HEADS; h++)
#pragma unroll
        for (int e = 0; e < HELD; e++) s[h][e] = held(m, p, h, e);
}

DEVICE void leave_state(const State& s, const Rows& m, const Place& p) {
#pragma unroll
    for (int h = 0; h < HEADS; h++)
#pragma unroll
        for (int e = 0; e < HELD; e++) held(m, p, h, e) = s[h][e];
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

DEVICE void row_part(float4 (&x)[HELD / 4], const float4* row, int r) {
#pragma unroll
    for (int i = 0; i < HELD / 4; i++) x[i] = row[8 * i + r];
}

// This lane's part of S^T x.
DEVICE float dot(const float (&s)[HELD], const float4 (&x)[HELD / 4]) {
    float a = mul_rn(s[0], x[0].x), b = mul_rn(s[1], x[0].y);
    float c = mul_rn(s[2], x[0].z), d = mul_rn(s[3], x[0].w);
#pragma unroll
    for (int i = 1; i < HELD / 4; i++) {
        a = fma_rn(s[4 * i], x[i].x, a);
        b = fma_rn(s[4 * i + 1], x[i].y, b);
        c = fma_rn(s[4 * i + 2], x[i].z, c);
        d = fma_rn(s[4 * i + 3], x[i].w, d);
    }
    return add_rn(add_rn(a, b), add_rn(c, d));
}

#if !SAVES_STATES
// The records on their way into shared memory, all that there are: how many count is not known yet.
DEVICE void fetch_records(const Rows& m, const Place& p, const float* k, const float* d, int held,
                          int key_heads, int value_heads) {
    for (int i = threadIdx.x; i < held * FOURS; i += THREADS)
        copy_async16(shared_address(m.k + i),
                     k + ((i / FOURS * key_heads + p.key_head) * FOURS + i % FOURS) * 4);
    constexpr int FOUR = HEADS * SLAB / 4;
    for (int i = threadIdx.x; i < held * FOUR; i += THREADS) {
        const int t = i / FOUR, h = i % FOUR / 4, four = i % 4;
        copy_async16(shared_address(m.v + i * 4),
                     d + (t * value_heads + p.head + h) * D + p.slab * SLAB + four * 4);
    }
}

DEVICE void fetch_decays(const Rows& m, const Place& p, const float* decay, int held,
                         int value_heads) {
    for (int i = threadIdx.x; i < held * HEADS; i += THREADS)
        m.gates[i / HEADS * GATES + i % HEADS] = decay[i / HEADS * value_heads + p.head + i % HEADS];
}

// n records into the state.
DEVICE void fold(State& s, const Rows& m, const Place& p, int n) {
#pragma unroll 2
    for (int t = 0; t < n; t++) {
        float4 k[HELD / 4];
        row_part(k, m.k + t * FOURS, p.r);
        const float* const d = m.v + t * (HEADS * SLAB) + 4 * p.warp + p.c;
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            decayed(s[h], m.gates[t * GATES + h]);
            added(s[h], k, d[h * SLAB]);
        }
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
DEVICE float pick(const float (&x)[HEADS], int r) {
    if (HEADS == 3 && r / 2 == 2) return x[HEADS - 1];
    return r / 2 % 2 ? x[HEADS > 1] : x[0];
}

// As column_sum, but each head's to the lanes of its own alone: r / 2 is the head.
DEVICE float sum_of_head(const float (&x)[HEADS]) {
    const bool upper = threadIdx.x & 16, odd = threadIdx.x & 8;
    const float first = x[0], middle = x[HEADS > 1], last = x[HEADS == 3 ? 2 : 0];
    const float a = add_rn(upper ? last : first, shuffle_xor(upper ? first : last, 16));
    const float b = add_rn(middle, shuffle_xor(middle, 16));
    const float sum = add_rn(odd ? b : a, shuffle_xor(odd ? a : b, 8));
    return add_rn(sum, shuffle_xor(sum, 4));
}

// One row: the state moves on; d of every head, o of the lane's.
DEVICE float step(State& s, const Rows& m, const Place& p, int t, float (&d)[HEADS]) {
    float4 k[HELD / 4], q[HELD / 4];
    row_part(k, m.k + t * FOURS, p.r);
    row_part(q, m.q + t * FOURS, p.r);
    float decay[HEADS], beta[HEADS], v[HEADS], in_k[HEADS], in_q[HEADS];
    const float* const gates = m.gates + t * GATES;
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        decay[h] = gates[h], beta[h] = gates[4 + h];
        v[h] = m.v[(t * HEADS + h) * SLAB + 4 * p.warp + p.c];
    }
    // Both sums are of the state before its decay, which moves on while they cross the lanes:
    // o = (decay S + k d)^T q = decay S^T q + (k . q) d.
#pragma unroll
    for (int h = 0; h < HEADS; h++) in_k[h] = dot(s[h], k);
#pragma unroll
    for (int h = 0; h < HEADS; h++) in_k[h] = column_sum(in_k[h]);
#pragma unroll
    for (int h = 0; h < HEADS; h++) in_q[h] = dot(s[h], q);
#pragma unroll
    for (int h = 0; h < HEADS; h++) decayed(s[h], decay[h]);
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        d[h] = mul_rn(beta[h], fma_rn(-decay[h], in_k[h], v[h]));
        added(s[h], k, d[h]);
    }
    return fma_rn(gates[3], pick(d, p.r), mul_rn(pick(decay, p.r), sum_of_head(in_q)));
}

#if SAVES_STATES
DEVICE void save_state(float* state, const State& s, const Place& p) {
#pragma unroll
    for (int h = 0; h < HEADS; h++)
#pragma unroll
        for (int e = 0; e < HELD; e++)
            state[(static_cast<i64>(p.head + h) * D + e / 4 * 32 + 4 * p.r + e % 4) * D +
                  p.column()] = s[h][e];
}
#endif

KERNEL void __launch_bounds__(THREADS, 2)
gdn_rows(const u16* qkv, const u16* b, const u16* a, const void* conv_weight, const void* a_log,
         const void* dt_bias, const i32* accepted, const float* state, const u16* tail,
         const u16* record_qkv, const float* record_k, const float* record_d,
         const float* record_decay, const float* states, u16* o, float* next_state, u16* next_tail,
         u16* next_record_qkv, float* next_record_k, float* next_record_d, float* next_record_decay,
         float* next_states, int rows, int held, int key_heads, int value_heads, int conv_f32,
         int a_log_f32, int dt_bias_f32) {
    DYNAMIC_SHARED(memory);
    let_next_start();
    const Place p = place_of(key_heads, value_heads);
    if (p.head >= value_heads) {  // keeps a multiprocessor from a second block of the next launch
        wait_for_previous();
        return;
    }
    const Rows m = rows_at(memory, max(rows, held));
    const int n = *accepted;
#if SAVES_STATES
    const i64 each = static_cast<i64>(value_heads) * D * D;
    fetch_state(m, p, n == 0 ? state : states + (n - 1) * each);
#else
    fetch_state(m, p, state);
    fetch_records(m, p, record_k, record_d, held, key_heads, value_heads);
    fetch_decays(m, p, record_decay, held, value_heads);
#endif
    copy_async_commit();
    Keys keys;
    Values values;
    Gates gates;
    Taps key_taps[4], value_taps[2];
    keys.stand(p, key_heads);
    values.stand(p, key_heads);
    gates.stand(p, rows, a_log, dt_bias, a_log_f32, dt_bias_f32);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        key_taps[i] = load_taps(conv_weight, keys.channel + 2 * i, conv_f32);
        key_taps[2 + i] = load_taps(conv_weight, keys.k_channel + 2 * i, conv_f32);
        value_taps[i] = load_taps(conv_weight, values.channel + 2 * i, conv_f32);
    }
    copy_async_wait<0>();
    sync_block();

    State s;
    take_state(s, m, p);
#if !SAVES_STATES
    fold(s, m, p, n);
    leave_state(s, m, p);
#endif
    sync_block();
    wait_for_previous();
    const Inputs x{qkv, tail, record_qkv, (2 * key_heads + value_heads) * D, n};
    keys.load(x, p, 0, rows);
    values.load(x, 0, rows);
    gates.load(p, a, b, value_heads);
    put_state(next_state, m, p);
    for (int first = 0;;) {
        keys.keep_inputs(p, next_record_qkv, next_tail, x.channels);
        keys.put(m, p, key_taps, key_heads, next_record_k);
        values.put(m, value_taps, next_record_qkv, next_tail, x.channels);
        if ((first += TOGETHER) >= rows) break;
        keys.load(x, p, first, rows);
        values.load(x, first, rows);
    }
    gates.put(m, p, value_heads, next_record_decay);
    sync_block();

    const int width = value_heads * D;
    int at = (p.head + min(p.r / 2, HEADS - 1)) * D + p.column();
    const bool mine = p.r % 2 == 0 && p.r / 2 < HEADS;
#pragma unroll 1
    for (int t = 0; t < rows; t++, at += width) {
        float d[HEADS];
        const float y = step(s, m, p, t, d);
        if (mine) o[at] = float_bf16(y);
#if SAVES_STATES
        save_state(next_states + static_cast<i64>(t) * width * D, s, p);
#else
        if (mine) next_record_d[at] = pick(d, p.r);
#endif
    }
}
