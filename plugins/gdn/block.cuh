// The rows of a block to verify, before the recurrence: q, k, v and gates of what a block of four
// warps works for, HEADS value heads of one key head and SLAB columns of each, into shared memory.
// A warp convolves q and k of four whole rows, so their norms are sums over its own lanes.
#pragma once
#include "gdn/rows.cuh"

#ifndef HEADS
#error "HEADS must be defined"
#endif
static_assert(HEADS >= 1 && HEADS <= 3, "a row's gates are eight floats");

constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr int SLAB = 16, SLABS = D / SLAB;  // columns of each head; as in launch.py
constexpr int FOURS = D / 4;                // of a row of q or k
constexpr int TILE = D * SLAB;              // floats of the state of a head and slab
constexpr int GATES = 8;                    // floats: decay of each head, k . q at 3, beta from 4
constexpr int TOGETHER = 16;                // rows that are convolved at once: four a warp
constexpr int EACH = TOGETHER / WARPS;      // q and k of a warp
constexpr int VALUE_ROWS = 2;               // v of a thread

// Where the block and this lane stand.
struct Place {
    int slab, head, key_head;  // `head`: the first of HEADS
    int warp, r, c;
    bool first;                // of the key head's blocks of this slab

    DEVICE int column() const { return slab * SLAB + 4 * warp + c; }
};

DEVICE Place place_of(int key_heads, int value_heads) {
    Place p;
    const int lane = threadIdx.x % 32, ratio = value_heads / key_heads;
    p.slab = blockIdx.x % SLABS;
    p.head = blockIdx.x / SLABS * HEADS;
    p.key_head = p.head / ratio;
    p.first = p.head % ratio == 0;
    p.warp = threadIdx.x / 32, p.r = lane / 4, p.c = lane % 4;
    return p;
}

// Shared memory.
struct Rows {
    float* tile;      // [HEADS][D][SLAB], fours of a row in tile_at's order
    float4 *k, *q;    // [rows][FOURS]
    float* v;         // [rows][HEADS][SLAB]; while folding, d
    float* gates;     // [rows][GATES]
};

DEVICE Rows rows_at(u8* memory, int rows) {
    Rows m;
    m.tile = reinterpret_cast<float*>(memory);
    m.k = reinterpret_cast<float4*>(m.tile + HEADS * TILE);
    m.q = m.k + rows * FOURS;
    m.v = reinterpret_cast<float*>(m.q + rows * FOURS);
    m.gates = m.v + rows * (HEADS * SLAB);
    return m;
}

// The inputs of N rows from `t` on and of the three before, four channels wide. Rows from `count`
// on are not there.
template <int N> struct Window {
    uint2 x[N + TAPS - 1];

    DEVICE void load(const Inputs& in, int t, int channel, int count) {
#pragma unroll
        for (int i = 0; i < N + TAPS - 1; i++) {
            const int row = t + i - (TAPS - 1);
            x[i] = row < count ? in.four(row, channel) : make_uint2(0, 0);
        }
    }
    DEVICE float4 convolved(const Taps& low, const Taps& high, int i) const {
        const float2 a = ::convolved(low, x[i].x, x[i + 1].x, x[i + 2].x, x[i + 3].x);
        const float2 b = ::convolved(high, x[i].y, x[i + 1].y, x[i + 2].y, x[i + 3].y);
        return make_float4(a.x, a.y, b.x, b.y);
    }
    DEVICE void keep(u16* rows, int i, int t, int channels, int channel) const {
        *reinterpret_cast<uint2*>(rows + t * channels + channel) = x[i + TAPS - 1];
    }
    // next_tail: the three inputs before the block.
    DEVICE void keep_tail(u16* tail, int channels, int channel) const {
#pragma unroll
        for (int i = 0; i < TAPS - 1; i++)
            *reinterpret_cast<uint2*>(tail + i * channels + channel) = x[i];
    }
};

// Sums over the warp of EACH rows' values; lane l has those of row l / 8.
DEVICE float sum_of_row(const float (&x)[EACH]) {
    const bool upper = threadIdx.x & 16, odd = threadIdx.x & 8;
    const float a = add_rn(upper ? x[2] : x[0], shuffle_xor(upper ? x[0] : x[2], 16));
    const float b = add_rn(upper ? x[3] : x[1], shuffle_xor(upper ? x[1] : x[3], 16));
    float sum = add_rn(odd ? b : a, shuffle_xor(odd ? a : b, 8));
#pragma unroll
    for (int mask = 4; mask; mask /= 2) sum = add_rn(sum, shuffle_xor(sum, mask));
    return sum;
}

// q and k of a warp's rows: convolved and brought to unit length; `record` receives k.
struct Keys {
    Window<EACH> q, k;
    int t, count, channel, k_channel;

    // The channels' place, whatever the rows.
    DEVICE void stand(const Place& p, int key_heads) {
        channel = p.key_head * D + threadIdx.x % 32 * 4, k_channel = channel + key_heads * D;
    }
    DEVICE void load(const Inputs& in, const Place& p, int first, int rows) {
        t = first + p.warp * EACH, count = rows;
        q.load(in, t, channel, count);
        k.load(in, t, k_channel, count);
    }
    // The rows that are this block's to keep.
    DEVICE bool keeps(const Place& p, int row) const {
        return p.first && row % SLABS == p.slab && row < count;
    }
    DEVICE void keep_inputs(const Place& p, u16* rows, u16* tail, int channels) const {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            if (!keeps(p, t + i)) continue;
            q.keep(rows, i, t + i, channels, channel);
            k.keep(rows, i, t + i, channels, k_channel);
        }
        if (t != 0 || !keeps(p, 0)) return;
        q.keep_tail(tail, channels, channel);
        k.keep_tail(tail, channels, k_channel);
    }
    DEVICE void put(const Rows& m, const Place& p, const Taps (&taps)[4], int key_heads,
                    float* record) const {
        const int lane = threadIdx.x % 32;
        float4 query[EACH], key[EACH];
        float qq[EACH], kk[EACH], kq[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            query[i] = q.convolved(taps[0], taps[1], i);
            key[i] = k.convolved(taps[2], taps[3], i);
            qq[i] = dot4(query[i], query[i]), kk[i] = dot4(key[i], key[i]);
            kq[i] = dot4(key[i], query[i]);
        }
        const float q_scale = QUERY_SCALE / sqrtf(sum_of_row(qq) + NORM_EPSILON);
        const float k_scale = 1.0f / sqrtf(sum_of_row(kk) + NORM_EPSILON);
        const float product = sum_of_row(kq) * k_scale * q_scale;
        const int mine = t + lane / 8;
        if (lane % 8 == 0 && mine < count) m.gates[mine * GATES + 3] = product;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const float4 a = scaled4(query[i], shuffle(q_scale, 8 * i));
            const float4 b = scaled4(key[i], shuffle(k_scale, 8 * i));
            const int row = t + i;
            if (row >= count) continue;
            m.q[row * FOURS + lane] = a, m.k[row * FOURS + lane] = b;
            if (record == nullptr || !keeps(p, row)) continue;
            reinterpret_cast<float4*>(record)[(row * key_heads + p.key_head) * FOURS + lane] = b;
        }
    }
};

// v of the block's columns: four of one head and VALUE_ROWS rows a thread.
struct Values {
    Window<VALUE_ROWS> v;
    int t, count, column, channel;  // `column` of HEADS * SLAB

    // The channel's place, whatever the rows.
    DEVICE void stand(const Place& p, int key_heads) {
        column = threadIdx.x % (HEADS * SLAB / 4) * 4;
        channel = (2 * key_heads + p.head + column / SLAB) * D + p.slab * SLAB + column % SLAB;
    }
    DEVICE void load(const Inputs& in, int first, int rows) {
        const int part = threadIdx.x / (HEADS * SLAB / 4);
        t = first + part * VALUE_ROWS, count = part < TOGETHER / VALUE_ROWS ? rows : 0;
        if (t < count) v.load(in, t, channel, count);
    }
    DEVICE void put(const Rows& m, const Taps (&taps)[2], u16* rows, u16* tail,
                    int channels) const {
#pragma unroll
        for (int i = 0; i < VALUE_ROWS; i++) {
            if (t + i >= count) continue;
            *reinterpret_cast<float4*>(m.v + (t + i) * (HEADS * SLAB) + column) =
                v.convolved(taps[0], taps[1], i);
            v.keep(rows, i, t + i, channels, channel);
        }
        if (t == 0 && count != 0) v.keep_tail(tail, channels, channel);
    }
};
static_assert(HEADS * SLAB / 4 * (TOGETHER / VALUE_ROWS) <= THREADS - 32, "the last warp: gates");

// The gates of one row, by a lane of the last warp.
struct Gates {
    float a_log[HEADS], dt_bias[HEADS], a[HEADS], b[HEADS];
    int t;  // -1: none

    DEVICE void stand(const Place& p, int rows, const void* logs, const void* biases, bool logs_f32,
                      bool biases_f32) {
        t = p.warp == WARPS - 1 && threadIdx.x % 32 < rows ? threadIdx.x % 32 : -1;
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            a_log[h] = plain(logs, p.head + h, logs_f32);
            dt_bias[h] = plain(biases, p.head + h, biases_f32);
        }
    }
    DEVICE void load(const Place& p, const u16* rows_a, const u16* rows_b, int value_heads) {
        if (t < 0) return;
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            a[h] = bf16_float(rows_a[t * value_heads + p.head + h]);
            b[h] = bf16_float(rows_b[t * value_heads + p.head + h]);
        }
    }
    DEVICE void put(const Rows& m, const Place& p, int value_heads, float* record) const {
        if (t < 0) return;
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            const float decay = decay_gate(a[h], a_log[h], dt_bias[h]);
            m.gates[t * GATES + h] = decay, m.gates[t * GATES + 4 + h] = beta_gate(b[h]);
            if (p.slab == 0 && record != nullptr) record[t * value_heads + p.head + h] = decay;
        }
    }
};
