// The rows of a verify before the recurrence: computes q, k and v into shared memory, for the HEADS
// value heads of one key head, SLAB columns of each, that a thread block works on. A warp processes
// one row, so that the norms are sums over its own lanes; a lane has four channels.
//
// Compile-time, from launch.py: KEY_HEADS, VALUE_HEADS, the types of the plain parameters, NEXT;
// HEADS and SLAB, value heads of a block and columns of each; THREADS; MOST_ROWS; GATES, floats of a
// row's gates; BARRIER_BYTES.
#pragma once
#include "gdn/conv_gates.cuh"

#if !defined(KEY_HEADS) || !defined(VALUE_HEADS)
#error "KEY_HEADS and VALUE_HEADS must be defined"
#endif
#if !defined(CONV_WEIGHT_F32) || !defined(A_LOG_F32) || !defined(DT_BIAS_F32)
#error "the types of the plain parameters must be defined"
#endif
#ifndef NEXT
#error "NEXT must be defined"
#endif

constexpr int RATIO = VALUE_HEADS / KEY_HEADS;
static_assert(RATIO % HEADS == 0, "a block has value heads of one key head");
constexpr int CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * D;
constexpr int WIDTH = VALUE_HEADS * D;
constexpr int WALKERS = 4;                  // warps that hold the state
constexpr int MAKERS = 4;                   // warps that prepare the rows, one row each at a time
static_assert(THREADS == 32 * (WALKERS + MAKERS), "a warp is one or the other");
constexpr int SLABS = D / SLAB;             // of each head
constexpr int FOURS = D / 4;                // groups of four in a row of q or k
constexpr int COLUMNS = HEADS * SLAB;       // of a thread block
// GATES floats: decay of each head, k . q at 3, beta from 4

// Which part of the work is this block's and this thread's.
struct Place {
    int slab, head, key_head;  // `head`: the first of HEADS
    int warp, lane;

    // The position in a row of v, d or o of the x-th group of four of the block's columns.
    DEVICE int value_four(int x) const { return (head + x / 4) * D + slab * SLAB + x % 4 * 4; }
};

DEVICE Place place_of() {
    Place p;
    p.slab = blockIdx.x % SLABS;
    p.head = blockIdx.x / SLABS * HEADS;
    p.key_head = p.head / RATIO;
    p.warp = threadIdx.x / 32, p.lane = threadIdx.x % 32;
    return p;
}

// Layout of a row in shared memory, or of a record, which has no q; offsets in floats. A row is
// contiguous, so that a loop over rows advances a single address. Values that all lanes read at
// once lie within one line of 128 bytes.
struct Rows {
    static constexpr int K = 0, V = D, GATE = V + COLUMNS, Q = (GATE + GATES + 31) / 32 * 32;
    static constexpr int PITCH = Q + D, RECORD_PITCH = Q;
    float* first;

    DEVICE float* row(int t) const { return first + t * PITCH; }
    DEVICE float* record(int t) const { return first + t * RECORD_PITCH; }
};

// The barriers between makers and walkers, each used once. Every lane arrives for itself: racecheck
// does not understand one lane that arrives for others.
struct Barriers {
    saddr at;
    static constexpr int TURNS = MOST_ROWS / MAKERS;
    static constexpr int BYTES = BARRIER_BYTES;
    static_assert(8 * (2 * TURNS + 2) <= BYTES, "two barriers for each step of the makers, and two more");

    // Row t is ready, and so are the others of its group of MAKERS rows.
    DEVICE saddr made(int t) const { return at + t / MAKERS * 8; }
    // The o of these rows is in shared memory.
    DEVICE saddr walked(int t) const { return made(t) + TURNS * 8; }
    // The state and all records are in shared memory.
    DEVICE saddr fetched() const { return at + 2 * TURNS * 8; }
    // The tile holds the state that is to be written back.
    DEVICE saddr folded() const { return fetched() + 8; }
    // Called by one thread; the block must synchronise before any other use.
    DEVICE void init() const {
        for (int t = 0; t < MOST_ROWS; t += MAKERS) {
            barrier_init(made(t), 32 * MAKERS);
            if (NEXT) barrier_init(walked(t), 32 * WALKERS);
        }
        barrier_init(fetched(), THREADS);
        barrier_init(folded(), 32 * WALKERS);
        barrier_init_done();
    }
    // Waits for all arrivals, then reconverges the warp. Without this, the compiler for sm_110
    // treats the lanes as diverged from here on, emits all code with shuffles twice and runs out of
    // registers.
    DEVICE static void wait(saddr barrier) {
        barrier_wait(barrier, 0);
        sync_warp();
    }
};

// The rows before the convolution, bf16, including the three rows of history: q | k | v of the
// block's columns. The history may arrive before the rows do.
struct Raw {
    u16* at;
    static constexpr int K = D, V = 2 * D, PITCH = 2 * D + COLUMNS;

    DEVICE u16* row(int t) const { return at + (t + TAPS - 1) * PITCH; }
};

// A warp's copies of rows into Raw: a lane's source and destination, computed before the rows are
// available.
struct Feed {
    int keys, values;  // offsets in an input row; keys: q or k
    saddr to;          // address of the keys of row 0
    int value_by;      // from there to the values, bytes
    bool has_values;

    DEVICE Feed(const Place& p, const Raw& raw) {
        const int half = p.lane / 16, piece = p.lane % 16 * 8;
        keys = (half * KEY_HEADS + p.key_head) * D + piece;
        values = 2 * KEY_HEADS * D + p.value_four(2 * (p.lane % (COLUMNS / 8)));
        to = shared_address(raw.row(0) + half * Raw::K + piece);
        value_by = 2 * (Raw::V + p.lane * 8 - half * Raw::K - piece);
        has_values = p.lane < COLUMNS / 8;
    }
    // Starts copying row t from `from`.
    DEVICE void fetch(const u16* from, int t) const {
        const saddr at = to + 2 * t * Raw::PITCH;
        copy_async16(at, from + keys);
        if (has_values) copy_async16(at + value_by, from + values);
    }
};

// The inputs of a row and of the three rows before it, for four channels.
struct Window {
    uint2 x[TAPS];

    // `row`: the earliest of the rows.
    DEVICE void load(const u16* row) {
#pragma unroll
        for (int i = 0; i < TAPS; i++)
            x[i] = *reinterpret_cast<const uint2*>(row + i * Raw::PITCH);
    }
    DEVICE float4 convolved(const Taps (&taps)[2]) const {
        const float2 a = ::convolved(taps[0], x[0].x, x[1].x, x[2].x, x[3].x);
        const float2 b = ::convolved(taps[1], x[0].y, x[1].y, x[2].y, x[3].y);
        return make_float4(a.x, a.y, b.x, b.y);
    }
    DEVICE void keep(u16* to) const { *reinterpret_cast<uint2*>(to) = x[TAPS - 1]; }
    // next_tail: the three inputs before the block.
    DEVICE void keep_tail(u16* to) const {
#pragma unroll
        for (int i = 0; i < TAPS - 1; i++) *reinterpret_cast<uint2*>(to + i * CHANNELS) = x[i];
    }
};

DEVICE float warp_sum(float x) {
#pragma unroll
    for (int mask = 16; mask; mask /= 2) x = add_rn(x, shuffle_xor(x, mask));
    return x;
}

// Prepares rows; holds what a lane needs for every row.
struct Maker {
    Taps q_taps[2], k_taps[2], v_taps[2];
    int q, k, v;  // channels
    bool has_v;   // whether the lane has a group of four of the block's columns

    DEVICE Maker(const Place& p, const void* weights) {
        has_v = p.lane < COLUMNS / 4;
        q = p.key_head * D + p.lane * 4, k = KEY_HEADS * D + q;
        v = 2 * KEY_HEADS * D + p.value_four(has_v ? p.lane : 0);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            q_taps[i] = load_taps(weights, q + 2 * i, CONV_WEIGHT_F32);
            k_taps[i] = load_taps(weights, k + 2 * i, CONV_WEIGHT_F32);
            v_taps[i] = load_taps(weights, v + 2 * i, CONV_WEIGHT_F32);
        }
    }

    // Prepares row t. Of the blocks that share a key head, one per row stores the inputs of q and
    // k, and k, as the record: the blocks of different slabs take rows in turn.
    DEVICE void row(const Rows& m, const Place& p, const Raw& raw, int t, u16* next_tail,
                     u16* record_qkv, float* record_k) const {
        Window wq, wk, wv;
        const u16* const earliest = raw.row(t - (TAPS - 1));
        wq.load(earliest + p.lane * 4);
        wk.load(earliest + Raw::K + p.lane * 4);
        if (has_v) wv.load(earliest + Raw::V + p.lane * 4);

        const bool keeps = t % SLABS == p.slab && p.head % RATIO == 0;
        u16* const kept = record_qkv + t * CHANNELS;
        if (keeps) wq.keep(kept + q), wk.keep(kept + k);
        if (keeps && t == 0) wq.keep_tail(next_tail + q), wk.keep_tail(next_tail + k);
        if (has_v) wv.keep(kept + v);
        if (has_v && t == 0) wv.keep_tail(next_tail + v);

        const float4 query = wq.convolved(q_taps), key = wk.convolved(k_taps);
        const float qq = warp_sum(dot4(query, query)), kk = warp_sum(dot4(key, key));
        const float kq = warp_sum(dot4(key, query));
        const float q_scale = mul_rn(QUERY_SCALE, rsqrtf(add_rn(qq, NORM_EPSILON)));
        const float k_scale = rsqrtf(add_rn(kk, NORM_EPSILON));
        const float4 unit = scaled4(key, k_scale);
        float* const to = m.row(t);
        reinterpret_cast<float4*>(to + Rows::Q)[p.lane] = scaled4(query, q_scale);
        reinterpret_cast<float4*>(to + Rows::K)[p.lane] = unit;
        if (p.lane == 0) to[Rows::GATE + 3] = mul_rn(mul_rn(kq, k_scale), q_scale);
        if (has_v) reinterpret_cast<float4*>(to + Rows::V)[p.lane] = wv.convolved(v_taps);
        if (keeps && record_k != nullptr)
            reinterpret_cast<float4*>(record_k)[(t * KEY_HEADS + p.key_head) * FOURS + p.lane] =
                unit;
    }
};

// The gates of the rows: each warp has one head, each lane one row.
struct Gates {
    float rate, dt_bias, a, b;
    int head, at;

    DEVICE bool mine(const Place& p, int rows) const { return p.warp < HEADS && p.lane < rows; }
    DEVICE Gates(const Place& p, const void* a_log, const void* biases) {
        head = p.head + min(p.warp, HEADS - 1), at = p.lane * VALUE_HEADS + head;
        rate = -expf(plain(a_log, head, A_LOG_F32));
        dt_bias = plain(biases, head, DT_BIAS_F32);
    }
    DEVICE void load(const u16* rows_a, const u16* rows_b) {
        a = bf16_float(rows_a[at]), b = bf16_float(rows_b[at]);
    }
    DEVICE void put(const Rows& m, const Place& p, float* record) const {
        const float decay = expf(mul_rn(rate, softplus(add_rn(a, dt_bias))));
        float* const gates = m.row(p.lane) + Rows::GATE;
        gates[p.warp] = decay;
        gates[4 + p.warp] = sigmoid(b);
        if (p.slab == 0 && record != nullptr) record[at] = decay;
    }
};
