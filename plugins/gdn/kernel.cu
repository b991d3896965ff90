// gdn in one launch: fold the accepted records, write the state back, run the block's rows.
//
// A block works for one key head: q and k of its rows are convolved and normalised once, into shared
// memory, for all the columns it owns. The columns of the key head's value heads (ratio * 128, next
// to each other in every array but the state) go to warps in fours: lane 4r + c holds rows
// 32i + 4r + j, i, j < 4, of column c in registers, so a sum over rows is three shuffles.
//
// Nothing but the rows themselves comes from the kernel before this one. State, records, tail and
// the count of accepted rows were written in an earlier step, and a step's first kernel starts only
// when the step before has ended and its control words are in place (a graph waits for the graph
// before it): they are read, and the fold is done, before wait_for_previous.
#include "gdn/rows.cuh"

#ifndef PREFILL
#error "PREFILL must be defined"
#endif
#ifndef SAVES_STATES
#error "SAVES_STATES must be defined"
#endif

constexpr int LANES = 8;             // lanes that share a column
constexpr int COLUMNS = 32 / LANES;  // of a warp; must agree with launch.py
constexpr int HELD = D / LANES;      // state elements of a lane
constexpr int MOST_THREADS = 512;
constexpr int MOST_HEADS = 2;        // value heads that a block's columns touch
constexpr int RUN = 8;               // rows a thread has loads under way for

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
    float *decay, *beta;   // [MOST_HEADS][rows]
    float* kq;             // [rows]: k . q
    int rows;
};

DEVICE Rows rows_at(u8* memory, int rows, int columns) {
    Rows s;
    s.rows = rows;
    s.k = reinterpret_cast<float4*>(memory);
    s.q = s.k + rows * (D / 4);
    s.v = reinterpret_cast<float*>(s.q + rows * (D / 4));
    s.decay = s.v + rows * columns;
    s.beta = s.decay + MOST_HEADS * rows;
    s.kq = s.beta + MOST_HEADS * rows;
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
            m.decay[slot * m.rows + t] = record_decay[t * value_heads + p.head(slot)];
    }
    sync_block();
    if (p.active) {
        for (int t = 0; t < n; t++) {
            float4 k[HELD / 4];
            row_part(k, m.k + t * (D / 4), p.r);
            decayed(s, m.decay[p.slot() * m.rows + t]);
            added(s, k, m.v[t * p.columns + p.column - p.first]);
        }
    }
    sync_block();
}
#endif

// q or k of a pair of channels: convolved, not yet normalised. Rows first..first+count-1 of the call
// go to rows 0.. of shared memory; `keep` receives the inputs where it is not null.
DEVICE void convolve_keys(const Rows& m, const Place& p, const Inputs& x, const Taps& taps,
                          int channel, int first, int count, u16* keep) {
    const int parts = blockDim.x / D, part = threadIdx.x / D, pair = threadIdx.x % D;
    const int end = (part + 1) * count / parts;
    int t = part * count / parts;
    float* const to = reinterpret_cast<float*>(pair < D / 2 ? m.q : m.k) + pair % (D / 2) * 2;
    u32 x0 = x.pair(first + t - 3, channel), x1 = x.pair(first + t - 2, channel);
    u32 x2 = x.pair(first + t - 1, channel);
    for (; t < end; t += RUN) {
        u32 now[RUN];
#pragma unroll
        for (int i = 0; i < RUN; i++)
            if (t + i < end) now[i] = x.pair(first + t + i, channel);
#pragma unroll
        for (int i = 0; i < RUN; i++) {
            if (t + i < end) {
                const float2 y = convolved(taps, x0, x1, x2, now[i]);
                *reinterpret_cast<float2*>(to + (t + i) * D) = y;
                if (keep != nullptr) {
                    const i64 at = static_cast<i64>(first + t + i) * x.channels + channel;
                    *reinterpret_cast<u32*>(keep + at) = now[i];
                }
                x0 = x1, x1 = x2, x2 = now[i];
            }
        }
    }
}

// The same for v of the block's columns.
DEVICE void convolve_values(const Rows& m, const Place& p, const Inputs& x, const Taps& taps,
                            int channel, int first, int count, u16* keep) {
    const int pairs = p.columns / 2, pair = threadIdx.x % pairs;
    if (p.first + 2 * pair >= p.ratio * D) return;
    for (int t = threadIdx.x / pairs; t < count; t += blockDim.x / pairs) {
        const int row = first + t;
        const u32 now = x.pair(row, channel);
        const float2 y = convolved(taps, x.pair(row - 3, channel), x.pair(row - 2, channel),
                                   x.pair(row - 1, channel), now);
        *reinterpret_cast<float2*>(m.v + t * p.columns + 2 * pair) = y;
        if (keep != nullptr) {
            const i64 at = static_cast<i64>(row) * x.channels + channel;
            *reinterpret_cast<u32*>(keep + at) = now;
        }
    }
}

// decay and beta of the block's value heads; `record` [T, Hv] receives decay where it is not null.
DEVICE void open_gates(const Rows& m, const Place& p, const u16* a, const u16* b, const void* a_log,
                       const void* dt_bias, bool a_log_f32, bool dt_bias_f32, int first, int count,
                       int value_heads, float* record) {
    for (int i = threadIdx.x; i < MOST_HEADS * count; i += blockDim.x) {
        const int slot = i / count, t = i % count;
        const int start = (p.first / D + slot) * D;  // column 0 of the head
        if (start >= p.ratio * D || start >= p.first + p.columns) continue;
        const int head = p.head(slot);
        const i64 at = static_cast<i64>(first + t) * value_heads + head;
        const float decay = decay_gate(bf16_float(a[at]), plain(a_log, head, a_log_f32),
                                       plain(dt_bias, head, dt_bias_f32));
        m.decay[slot * m.rows + t] = decay;
        m.beta[slot * m.rows + t] = beta_gate(bf16_float(b[at]));
        if (record != nullptr && start >= p.first) record[at] = decay;
    }
}

// q and k to unit length; `record` [T, Hk, D] receives k where it is not null.
DEVICE void normalise(const Rows& m, const Place& p, int count, int key_heads, float* record) {
    const int lane = threadIdx.x % 32;
    for (int t = threadIdx.x / 32; t < count; t += blockDim.x / 32) {
        const int at = t * (D / 4) + lane;
        const float4 q = m.q[at], k = m.k[at];
        const float q_norm = sqrtf(warp_sum(dot4(q, q)) + NORM_EPSILON);
        const float k_norm = sqrtf(warp_sum(dot4(k, k)) + NORM_EPSILON);
        const float4 q_unit = scaled4(q, QUERY_SCALE / q_norm), k_unit = scaled4(k, 1.0f / k_norm);
        const float kq = warp_sum(dot4(q_unit, k_unit));
        m.q[at] = q_unit;
        m.k[at] = k_unit;
        if (lane == 0) m.kq[t] = kq;
        if (record != nullptr)
            reinterpret_cast<float4*>(record)[(t * key_heads + p.key_head) * (D / 4) + lane] = k_unit;
    }
}

// One row: the state moves on, d and o are the column's.
DEVICE void step(float (&s)[HELD], const Rows& m, const Place& p, int t, float& d, float& o) {
    float4 k[HELD / 4], q[HELD / 4];
    row_part(k, m.k + t * (D / 4), p.r);
    row_part(q, m.q + t * (D / 4), p.r);
    const int gate = p.slot() * m.rows + t;
    decayed(s, m.decay[gate]);
    // o = (S + k d)^T q = S^T q + (k . q) d: both sums are of the state before d is known.
    const float in_k = column_sum(dot(s, k)), in_q = column_sum(dot(s, q));
    const float v = m.v[t * p.columns + p.column - p.first];
    d = mul_rn(m.beta[gate], add_rn(v, -in_k));
    added(s, k, d);
    o = fma_rn(m.kq[t], d, in_q);
}

// next_tail: the three inputs before row `end` of the call. Every channel is written by one block.
DEVICE void keep_tail(u16* next_tail, const Inputs& x, const Place& p, int end, int key_channel,
                      int value_channel) {
    for (int j = threadIdx.x / D; j < TAPS - 1 && blockIdx.y == 0; j += blockDim.x / D)
        *reinterpret_cast<u32*>(next_tail + j * x.channels + key_channel) =
            x.pair(end - (TAPS - 1) + j, key_channel);
    const int pairs = p.columns / 2;
    if (p.first + threadIdx.x % pairs * 2 >= p.ratio * D) return;
    for (int j = threadIdx.x / pairs; j < TAPS - 1; j += blockDim.x / pairs)
        *reinterpret_cast<u32*>(next_tail + j * x.channels + value_channel) =
            x.pair(end - (TAPS - 1) + j, value_channel);
}

KERNEL void __launch_bounds__(MOST_THREADS)
gdn_rows(const u16* qkv, const u16* b, const u16* a, const void* conv_weight, const void* a_log,
         const void* dt_bias, const i32* accepted, const i32* valid, const float* state,
         const u16* tail, const u16* record_qkv, const float* record_k, const float* record_d,
         const float* record_decay, const float* states, u16* o, float* next_state, u16* next_tail,
         u16* next_record_qkv, float* next_record_k, float* next_record_d, float* next_record_decay,
         float* next_states, int rows, int piece, int key_heads, int value_heads, int conv_f32,
         int a_log_f32, int dt_bias_f32) {
    DYNAMIC_SHARED(memory);
    const Place p = place_of(key_heads, value_heads);
    const Rows m = rows_at(memory, piece, p.columns);
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
    const int pair = threadIdx.x % D, pairs = p.columns / 2;
    const int key_channel = (pair / (D / 2) * key_heads + p.key_head) * D + pair % (D / 2) * 2;
    const int last = p.ratio * D - 2;
    const int mine = p.first + threadIdx.x % pairs * 2;
    const int value_channel = (2 * key_heads + p.key_head * p.ratio) * D + (mine < last ? mine : last);
    const Taps key_taps = load_taps(conv_weight, key_channel, conv_f32);
    const Taps value_taps = load_taps(conv_weight, value_channel, conv_f32);
    const Inputs x{qkv, tail, record_qkv, (2 * key_heads + value_heads) * D, n};

#if !SAVES_STATES
    fold(s, m, p, record_k, record_d, record_decay, n, key_heads, value_heads);
#endif
    wait_for_previous();
    let_next_start();
#if PREFILL
    const int end = *valid;
#else
    const int end = rows;
    if (p.active) store_state(next_state, s, p);
    keep_tail(next_tail, x, p, 0, key_channel, value_channel);
#endif

    const i64 width = static_cast<i64>(value_heads) * D;
    for (int first = 0; first < end; first += piece) {
        const int count = end - first < piece ? end - first : piece;
        convolve_keys(m, p, x, key_taps, key_channel, first, count,
                      first_slab ? next_record_qkv : nullptr);
        convolve_values(m, p, x, value_taps, value_channel, first, count, next_record_qkv);
        open_gates(m, p, a, b, a_log, dt_bias, a_log_f32, dt_bias_f32, first, count, value_heads,
                   next_record_decay);
        sync_block();
        normalise(m, p, count, key_heads, first_slab ? next_record_k : nullptr);
        sync_block();
        if (p.active) {
#pragma unroll 1
            for (int t = 0; t < count; t++) {
                float d, y;
                step(s, m, p, t, d, y);
                const i64 at = (first + t) * width + p.value_column();
                if (p.r == 0) o[at] = float_bf16(y);
#if SAVES_STATES && !PREFILL
                store_state(next_states + (first + t) * static_cast<i64>(value_heads) * D * D, s, p);
#elif !PREFILL
                if (p.r == 0) next_record_d[at] = d;
#endif
            }
        }
        sync_block();
    }
#if PREFILL
    if (p.active) {
        store_state(next_state, s, p);
        for (int t = end + p.r; t < rows; t += LANES) o[t * width + p.value_column()] = 0;
    }
    keep_tail(next_tail, x, p, end, key_channel, value_channel);
#endif
}
