// gdn of a block to verify, in one launch: fold the accepted records, write the state back, run the
// rows, leave their records.
//
// A block works for one key head: q and k of its rows are convolved and normalised once, into
// shared memory, for all the columns it owns. The columns of the key head's value heads (ratio x
// 128, next to each other in every array but the state) go to warps in fours: lane 4r + c holds
// rows 32i + 4r + j, i, j < 4, of column c in registers, so a sum over rows is three shuffles.
//
// Nothing but the rows themselves comes from the kernel before this one. State, records, tail and
// the count of accepted rows were written in an earlier step, and a step's first kernel starts only
// when the step before has ended and its control words are in place (a graph waits for the graph
// before it): they are read, and the fold is done, before wait_for_previous.
#include "gdn/rows.cuh"

#ifndef SAVES_STATES
#error "SAVES_STATES must be defined"
#endif

constexpr int LANES = 8;             // lanes that share a column
constexpr int COLUMNS = 32 / LANES;  // of a warp; must agree with launch.py
constexpr int HELD = D / LANES;      // state elements of a lane
constexpr int MOST_THREADS = 384;    // and two blocks fit on a multiprocessor: one of the next call
constexpr int MOST_HEADS = 2;        // value heads that a block's columns touch
constexpr int RUN = 6;               // rows a thread has loads under way for

// Where the block and this lane stand.
struct Place {
    int key_head, ratio;   // value heads of a key head
    int first, columns;    // of the block, within the key head's ratio * D
    int column;            // this lane's
    int r;                 // its eighth of the rows, in fours
    bool active;           // false for the warps past the last column

    DEVICE int head(int slot) const { return key_head * ratio + first / D + slot; }
    DEVICE int slot() const { return column / D - first / D; }
    DEVICE int value_column() const { return key_head * ratio * D + column; }
};

DEVICE Place place_of(int key_heads, int value_heads) {
    Place p;
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    p.key_head = blockIdx.x;
    p.ratio = value_heads / key_heads;
    p.columns = warps * COLUMNS;
    p.first = blockIdx.y * p.columns;
    p.column = p.first + warp * COLUMNS + lane % COLUMNS;
    p.r = lane / COLUMNS;
    p.active = p.column < p.ratio * D;
    return p;
}

// Shared memory for `rows` rows.
struct Rows {
    float4 *k, *q;         // [rows][D / 4]
    float* v;              // [rows][columns]; while folding, d
    float2* gates;         // [MOST_HEADS][rows]: decay, beta
    float* kq;             // [rows]: k . q
    int rows;
};

DEVICE Rows rows_at(u8* memory, int rows, int columns) {
    Rows s;
    s.rows = rows;
    s.k = reinterpret_cast<float4*>(memory);
    s.q = s.k + rows * (D / 4);
    s.v = reinterpret_cast<float*>(s.q + rows * (D / 4));
    s.gates = reinterpret_cast<float2*>(s.v + rows * columns);
    s.kq = reinterpret_cast<float*>(s.gates + MOST_HEADS * rows);
    return s;
}

DEVICE i64 state_offset(const Place& p, int i, int j) {
    const int head = p.key_head * p.ratio + p.column / D;
    return (static_cast<i64>(head) * D + 32 * i + 4 * p.r + j) * D + p.column % D;
}

DEVICE void load_state(float (&s)[HELD], const float* state, const Place& p) {
#pragma unroll
    for (int e = 0; e < HELD; e++) s[e] = state[state_offset(p, e / 4, e % 4)];
}

DEVICE void store_state(float* state, const float (&s)[HELD], const Place& p) {
#pragma unroll
    for (int e = 0; e < HELD; e++) state[state_offset(p, e / 4, e % 4)] = s[e];
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
    float a = 0.0f, b = 0.0f, c = 0.0f, d = 0.0f;
#pragma unroll
    for (int i = 0; i < HELD / 4; i++) {
        a = fma_rn(s[4 * i], x[i].x, a);
        b = fma_rn(s[4 * i + 1], x[i].y, b);
        c = fma_rn(s[4 * i + 2], x[i].z, c);
        d = fma_rn(s[4 * i + 3], x[i].w, d);
    }
    return add_rn(add_rn(a, b), add_rn(c, d));
}

// Over the lanes of a column.
DEVICE float column_sum(float x) {
#pragma unroll
    for (int mask = COLUMNS; mask < 32; mask *= 2) x = add_rn(x, shuffle_xor(x, mask));
    return x;
}

#if !SAVES_STATES
// n records into the state.
DEVICE void fold(float (&s)[HELD], const Rows& m, const Place& p, const float* record_k,
                 const float* record_d, const float* record_decay, int n, int key_heads,
                 int value_heads) {
    const int threads = blockDim.x;
    const int limit = p.ratio * D - p.first;
    const float4* const k4 = reinterpret_cast<const float4*>(record_k);
    for (int i = threadIdx.x; i < n * (D / 4); i += threads)
        m.k[i] = k4[(i / (D / 4) * key_heads + p.key_head) * (D / 4) + i % (D / 4)];
    for (int i = threadIdx.x; i < n * p.columns; i += threads) {
        const int t = i / p.columns, c = i % p.columns;
        if (c < limit)
            m.v[i] = record_d[(t * value_heads + p.key_head * p.ratio) * D + p.first + c];
    }
    for (int i = threadIdx.x; i < MOST_HEADS * n; i += threads) {
        const int slot = i / n, t = i % n;
        if (p.first / D + slot < p.ratio)
            m.gates[slot * m.rows + t].x = record_decay[t * value_heads + p.head(slot)];
    }
    sync_block();
    if (p.active) {
        for (int t = 0; t < n; t++) {
            float4 k[HELD / 4];
            row_part(k, m.k + t * (D / 4), p.r);
            decayed(s, m.gates[p.slot() * m.rows + t].x);
            added(s, k, m.v[t * p.columns + p.column - p.first]);
        }
    }
    sync_block();
}
#endif

DEVICE void put_pair(u16* to, int row, int channels, int channel, u32 x) {
    *reinterpret_cast<u32*>(to + row * channels + channel) = x;
}

// next_tail: the three inputs before the block.
DEVICE void put_tail(u16* to, int channels, int channel, u32 x0, u32 x1, u32 x2) {
    put_pair(to, 0, channels, channel, x0);
    put_pair(to, 1, channels, channel, x1);
    put_pair(to, 2, channels, channel, x2);
}

// q or k of a pair of channels: convolved, not yet normalised. Where `keep` is not null it receives
// the inputs, and `tail` the three before them.
DEVICE void convolve_keys(const Rows& m, const Inputs& x, const Taps& taps, int channel, int count,
                          u16* keep, u16* tail) {
    const int parts = blockDim.x / D, part = threadIdx.x / D, pair = threadIdx.x % D;
    const int end = (part + 1) * count / parts;
    int t = part * count / parts;
    float* const to = reinterpret_cast<float*>(pair < D / 2 ? m.q : m.k) + pair % (D / 2) * 2;
    u32 x0 = x.pair(t - 3, channel), x1 = x.pair(t - 2, channel), x2 = x.pair(t - 1, channel);
    if (keep != nullptr && part == 0) put_tail(tail, x.channels, channel, x0, x1, x2);
    for (; t < end; t += RUN) {
        u32 now[RUN];
#pragma unroll
        for (int i = 0; i < RUN; i++)
            if (t + i < end) now[i] = x.pair(t + i, channel);
#pragma unroll
        for (int i = 0; i < RUN; i++) {
            if (t + i < end) {
                const float2 y = convolved(taps, x0, x1, x2, now[i]);
                *reinterpret_cast<float2*>(to + (t + i) * D) = y;
                if (keep != nullptr) put_pair(keep, t + i, x.channels, channel, now[i]);
                x0 = x1, x1 = x2, x2 = now[i];
            }
        }
    }
}

// The block's columns of v, pair by pair: thread `pair` + i * pairs takes every i-th row. The first
// row's inputs are asked for before the keys are convolved.
struct Values {
    int pairs, pair, channel, t;
    u32 x[TAPS];

    DEVICE bool mine(const Place& p, int count) const {
        return p.first + 2 * pair < p.ratio * D && t < count;
    }
    DEVICE void load(const Inputs& in) {
#pragma unroll
        for (int i = 0; i < TAPS; i++) x[i] = in.pair(t + i - (TAPS - 1), channel);
    }
};

DEVICE void convolve_values(const Rows& m, const Place& p, const Inputs& in, const Taps& taps,
                            Values& v, int count, u16* keep, u16* tail) {
    while (v.mine(p, count)) {
        if (v.t == 0) put_tail(tail, in.channels, v.channel, v.x[0], v.x[1], v.x[2]);
        *reinterpret_cast<float2*>(m.v + v.t * p.columns + 2 * v.pair) =
            convolved(taps, v.x[0], v.x[1], v.x[2], v.x[3]);
        put_pair(keep, v.t, in.channels, v.channel, v.x[3]);
        v.t += blockDim.x / v.pairs;
        if (v.mine(p, count)) v.load(in);
    }
}

// This thread's value head and row, if it has one. The last threads do: their warps have the fewest
// rows to normalise.
struct Gate {
    bool mine, keeps;  // `keeps`: column 0 of the head is the block's
    int slot, t, head;
    float a_log, dt_bias;
};

DEVICE Gate gate_of(const Place& p, int count, const void* a_log, const void* dt_bias,
                    bool a_log_f32, bool dt_bias_f32) {
    Gate g;
    const int i = blockDim.x - 1 - threadIdx.x;
    g.slot = i / count, g.t = i % count;
    const int start = (p.first / D + g.slot) * D;  // column 0 of the head
    g.mine = g.slot < MOST_HEADS && start < p.ratio * D && start < p.first + p.columns;
    g.keeps = start >= p.first;
    g.head = p.head(g.slot);
    g.a_log = g.mine ? plain(a_log, g.head, a_log_f32) : 0.0f;
    g.dt_bias = g.mine ? plain(dt_bias, g.head, dt_bias_f32) : 0.0f;
    return g;
}

// Over half a warp.
DEVICE float row_sum(float x) {
#pragma unroll
    for (int mask = 8; mask; mask /= 2) x = add_rn(x, shuffle_xor(x, mask));
    return x;
}

// q and k to unit length, half a warp a row; `record` [T, Hk, D] receives k where it is not null.
DEVICE void normalise(const Rows& m, const Place& p, int count, int key_heads, float* record) {
    const int lane = threadIdx.x % 16;
    for (int first = threadIdx.x / 32 * 2; first < count; first += blockDim.x / 16) {
        const int t = first + threadIdx.x / 16 % 2;
        const bool mine = t < count;
        const int at = (mine ? t : first) * (D / 4) + lane;
        const float4 q0 = m.q[at], q1 = m.q[at + 16], k0 = m.k[at], k1 = m.k[at + 16];
        const float qq = row_sum(add_rn(dot4(q0, q0), dot4(q1, q1)));
        const float kk = row_sum(add_rn(dot4(k0, k0), dot4(k1, k1)));
        const float kq = row_sum(add_rn(dot4(k0, q0), dot4(k1, q1)));
        const float q_scale = QUERY_SCALE / sqrtf(qq + NORM_EPSILON);
        const float k_scale = 1.0f / sqrtf(kk + NORM_EPSILON);
        sync_warp();  // a row without a partner was read by both halves
        if (!mine) continue;
        m.q[at] = scaled4(q0, q_scale), m.q[at + 16] = scaled4(q1, q_scale);
        m.k[at] = scaled4(k0, k_scale), m.k[at + 16] = scaled4(k1, k_scale);
        if (lane == 0) m.kq[t] = kq * k_scale * q_scale;
        if (record == nullptr) continue;
        float4* const to =
            reinterpret_cast<float4*>(record) + (t * key_heads + p.key_head) * (D / 4) + lane;
        to[0] = scaled4(k0, k_scale), to[16] = scaled4(k1, k_scale);
    }
}

// One row: the state moves on, d and o are the column's.
DEVICE void step(float (&s)[HELD], const Rows& m, const Place& p, int t, float& d, float& o) {
    float4 k[HELD / 4], q[HELD / 4];
    row_part(k, m.k + t * (D / 4), p.r);
    row_part(q, m.q + t * (D / 4), p.r);
    const float2 gate = m.gates[p.slot() * m.rows + t];
    decayed(s, gate.x);
    // o = (S + k d)^T q = S^T q + (k . q) d: both sums are of the state before d is known.
    const float in_k = column_sum(dot(s, k)), in_q = column_sum(dot(s, q));
    const float v = m.v[t * p.columns + p.column - p.first];
    d = mul_rn(gate.y, add_rn(v, -in_k));
    added(s, k, d);
    o = fma_rn(m.kq[t], d, in_q);
}

KERNEL void __launch_bounds__(MOST_THREADS, 2)
gdn_rows(const u16* qkv, const u16* b, const u16* a, const void* conv_weight, const void* a_log,
         const void* dt_bias, const i32* accepted, const float* state, const u16* tail,
         const u16* record_qkv, const float* record_k, const float* record_d,
         const float* record_decay, const float* states, u16* o, float* next_state, u16* next_tail,
         u16* next_record_qkv, float* next_record_k, float* next_record_d, float* next_record_decay,
         float* next_states, int rows, int room, int key_heads, int value_heads, int conv_f32,
         int a_log_f32, int dt_bias_f32) {
    DYNAMIC_SHARED(memory);
    let_next_start();
    const Place p = place_of(key_heads, value_heads);
    const Rows m = rows_at(memory, room, p.columns);
    const int n = *accepted;
    const bool first_slab = blockIdx.y == 0;

    float s[HELD];
    if (p.active) {
#if SAVES_STATES
        const i64 each = static_cast<i64>(value_heads) * D * D;
        load_state(s, n == 0 ? state : states + (n - 1) * each, p);
#else
        load_state(s, state, p);
#endif
    }
    const int pair = threadIdx.x % D;
    const int key_channel = (pair / (D / 2) * key_heads + p.key_head) * D + pair % (D / 2) * 2;
    const Taps key_taps = load_taps(conv_weight, key_channel, conv_f32);
    Values v;
    v.pairs = p.columns / 2, v.pair = threadIdx.x % v.pairs, v.t = threadIdx.x / v.pairs;
    v.channel = (2 * key_heads + p.key_head * p.ratio) * D + p.first + 2 * v.pair;
    Taps value_taps;
    if (v.mine(p, rows)) value_taps = load_taps(conv_weight, v.channel, conv_f32);
    const Gate gate = gate_of(p, rows, a_log, dt_bias, a_log_f32, dt_bias_f32);
    const Inputs x{qkv, tail, record_qkv, (2 * key_heads + value_heads) * D, n};

#if !SAVES_STATES
    fold(s, m, p, record_k, record_d, record_decay, n, key_heads, value_heads);
#endif
    wait_for_previous();
    // Every load that waits for the rows is under way before the first is used.
    if (v.mine(p, rows)) v.load(x);
    const int gate_at = gate.t * value_heads + gate.head;
    const float gate_a = gate.mine ? bf16_float(a[gate_at]) : 0.0f;
    const float gate_b = gate.mine ? bf16_float(b[gate_at]) : 0.0f;
    convolve_keys(m, x, key_taps, key_channel, rows, first_slab ? next_record_qkv : nullptr,
                  next_tail);
    convolve_values(m, p, x, value_taps, v, rows, next_record_qkv, next_tail);
    if (p.active) store_state(next_state, s, p);
    sync_block();
    if (gate.mine) {
        const float decay = decay_gate(gate_a, gate.a_log, gate.dt_bias);
        m.gates[gate.slot * m.rows + gate.t] = make_float2(decay, beta_gate(gate_b));
        if (gate.keeps && next_record_decay != nullptr) next_record_decay[gate_at] = decay;
    }
    normalise(m, p, rows, key_heads, first_slab ? next_record_k : nullptr);
    sync_block();
    if (!p.active) return;
    const int width = value_heads * D;
#pragma unroll 1
    for (int t = 0; t < rows; t++) {
        float d, y;
        step(s, m, p, t, d, y);
        const int at = t * width + p.value_column();
        if (p.r == 0) o[at] = float_bf16(y);
#if SAVES_STATES
        store_state(next_states + static_cast<i64>(t) * width * D, s, p);
#else
        if (p.r == 0) next_record_d[at] = d;
#endif
    }
}
