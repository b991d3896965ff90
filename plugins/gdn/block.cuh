// The rows of a block to verify, before the recurrence: q, k and v, into shared memory, of what a
// block of threads works for, HEADS value heads of one key head and SLAB columns of each. A warp
// does a row, so that its norms are sums over the warp's own lanes; a lane has four channels.
#pragma once
#include "gdn/rows.cuh"

#if !defined(KEY_HEADS) || !defined(VALUE_HEADS)
#error "KEY_HEADS and VALUE_HEADS must be defined"
#endif
#if !defined(CONV_WEIGHT_F32) || !defined(A_LOG_F32) || !defined(DT_BIAS_F32)
#error "the types of the plain parameters must be defined"
#endif

constexpr int RATIO = VALUE_HEADS / KEY_HEADS;
constexpr int HEADS = RATIO % 3 == 0 ? 3 : RATIO % 2 == 0 ? 2 : 1;  // as in launch.py
constexpr int CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * D;
constexpr int WIDTH = VALUE_HEADS * D;
constexpr int WALKERS = 4;                  // warps that have the state; as in launch.py
constexpr int MAKERS = 4;                   // warps that make the rows, as many at a time
constexpr int THREADS = 32 * (WALKERS + MAKERS);
constexpr int MOST_ROWS = 32;               // of a block; as in launch.py
constexpr int SLAB = 16, SLABS = D / SLAB;  // columns of each head; as in launch.py
constexpr int FOURS = D / 4;                // of a row of q or k
constexpr int COLUMNS = HEADS * SLAB;       // of a block
constexpr int GATES = 8;                    // floats: decay of each head, k . q at 3, beta from 4

// Where the block and this thread stand.
struct Place {
    int slab, head, key_head;  // `head`: the first of HEADS
    int warp, lane;

    // Of the block's columns in fours, the x-th: its place in a row of v, d or o.
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

// A row in shared memory, or a record, which has no q: floats from its first. All of a row lies
// together, so that whoever goes through rows moves one address; what all lanes read at once lies in
// one line of 128 bytes.
struct Rows {
    static constexpr int K = 0, V = D, GATE = V + COLUMNS, Q = (GATE + GATES + 31) / 32 * 32;
    static constexpr int PITCH = Q + D, RECORD_PITCH = Q;
    float* first;

    DEVICE float* row(int t) const { return first + t * PITCH; }
    DEVICE float* record(int t) const { return first + t * RECORD_PITCH; }
};

// What makers and walkers wait for of each other, each barrier for one use. Every lane arrives for
// itself: racecheck knows of no lane that speaks for others.
struct Barriers {
    saddr at;
    static constexpr int TURNS = MOST_ROWS / MAKERS;
    static constexpr int BYTES = 128;  // as in launch.py
    static_assert(8 * (TURNS + 2) <= BYTES, "a barrier for each turn, and two more");

    // Row t is made, and the others of its turn.
    DEVICE saddr made(int t) const { return at + t / MAKERS * 8; }
    // The state and all records are in shared memory.
    DEVICE saddr fetched() const { return at + TURNS * 8; }
    // The tile is as it is to be written back.
    DEVICE saddr folded() const { return at + TURNS * 8 + 8; }
    // By one thread; the block meets before any other use.
    DEVICE void init() const {
        for (int t = 0; t < MOST_ROWS; t += MAKERS) barrier_init(made(t), 32 * MAKERS);
        barrier_init(fetched(), THREADS);
        barrier_init(folded(), 32 * WALKERS);
        barrier_init_done();
    }
    // Until all have arrived; then the warp is together again. The compiler for sm_110 would else take
    // its lanes for divided from here on, make all that has shuffles twice and run out of registers.
    DEVICE static void wait(saddr barrier) {
        barrier_wait(barrier, 0);
        sync_warp();
    }
};

// The rows before the convolution, bf16, from the three before the block on: q | k | v of the
// block's columns. The history may be there before the rows are.
struct Raw {
    u16* at;
    static constexpr int K = D, V = 2 * D, PITCH = 2 * D + COLUMNS;

    DEVICE u16* row(int t) const { return at + (t + TAPS - 1) * PITCH; }
};

// A warp's copies of rows into Raw: where a lane reads and writes one, known before the rows are
// there.
struct Feed {
    int keys, values;  // of an input row
    saddr to;          // of row 0, keys
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
    // Row t, which lies at `from`.
    DEVICE void fetch(const u16* from, int t) const {
        const saddr at = to + 2 * t * Raw::PITCH;
        copy_async16(at, from + keys);
        if (has_values) copy_async16(at + value_by, from + values);
    }
};

// The inputs of a row and of the three before, four channels wide.
struct Window {
    uint2 x[TAPS];

    // `row`: of the earliest.
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

// Makes rows: what a lane needs for any of them.
struct Maker {
    Taps q_taps[2], k_taps[2], v_taps[2];
    int q, k, v;  // channels
    bool has_v;   // the lane's four is of the block's columns

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

    // Row t. Of a key head's blocks one keeps q's and k's inputs and k: those of its slab.
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

// The gates of the rows: a warp has a head, a lane a row.
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
