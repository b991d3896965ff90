// A query row by eight lanes: RMSNorm, rotation, rounding. Lane l holds columns 4l .. 4l + 3 of each
// 32, so that a pair that turns lies in one lane, or for narrow rotations a few lanes apart.
#pragma once

#include "verify_attention/tile.cuh"

constexpr int QUADS = WIDTH / 32;

struct Query {
    float x[QUADS][4];
};
typedef Query QueryWeights;

DEVICE void four(float (&x)[4], const uint2& bits) {
    x[0] = bf16x2_low(bits.x);
    x[1] = bf16x2_high(bits.x);
    x[2] = bf16x2_low(bits.y);
    x[3] = bf16x2_high(bits.y);
}

// offset + weight of this lane's columns.
DEVICE void query_weights(QueryWeights& w, const void* weight, float offset, int l) {
#pragma unroll
    for (int m = 0; m < QUADS; m++) {
        if (NORM_F32) {
            const float4 y = static_cast<const float4*>(weight)[8 * m + l];
            w.x[m][0] = y.x, w.x[m][1] = y.y, w.x[m][2] = y.z, w.x[m][3] = y.w;
        } else {
            four(w.x[m], static_cast<const uint2*>(weight)[8 * m + l]);
        }
#pragma unroll
        for (int e = 0; e < 4; e++) w.x[m][e] = add_rn(w.x[m][e], offset);
    }
}

// A row as it came, its chunks swizzled.
DEVICE void load_query(Query& to, const u8* queries, int row, int l) {
#pragma unroll
    for (int m = 0; m < QUADS; m++) {
        const u8* from = queries + swizzled(row, 4 * m + l / 2, QUERY_PITCH);
        four(to.x[m], reinterpret_cast<const uint2*>(from)[l & 1]);
    }
}

// Pairs that lie JUMP quads apart.
template <int JUMP> DEVICE void rotate_quads(Query& q, const float* at, int l) {
#pragma unroll
    for (int m = 0; m < JUMP; m++) {
        const float4 cs = reinterpret_cast<const float4*>(at)[8 * m + l];
        const float4 sn = reinterpret_cast<const float4*>(at + 32 * JUMP)[8 * m + l];
        const float c[4] = {cs.x, cs.y, cs.z, cs.w}, s[4] = {sn.x, sn.y, sn.z, sn.w};
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float low = q.x[m][e], high = q.x[m + JUMP][e];
            q.x[m][e] = fma_rn(low, c[e], mul_rn(high, -s[e]));
            q.x[m + JUMP][e] = fma_rn(high, c[e], mul_rn(low, s[e]));
        }
    }
}

// Pairs that lie in lanes `half` / 4 apart, in the first quad.
DEVICE void rotate_lanes(Query& q, const float* at, int half, int l) {
    const int reach = half >> 2;
    const bool second = (l & reach) != 0;
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const float other = shuffle_xor(q.x[0][e], reach);
        if (l >= 2 * reach) continue;
        const int angle = (4 * l & (half - 1)) + e;
        const float s = second ? at[half + angle] : -at[half + angle];
        q.x[0][e] = fma_rn(q.x[0][e], at[angle], mul_rn(other, s));
    }
}

// Normalise, then rotate by row `angle` of the table.
DEVICE void turn_query(Query& q, const QueryWeights& w, const Rotation& by, int angle, float eps,
                       int l) {
    float sum[4] = {};
#pragma unroll
    for (int m = 0; m < QUADS; m++)
#pragma unroll
        for (int e = 0; e < 4; e++) sum[e] = fma_rn(q.x[m][e], q.x[m][e], sum[e]);
    float all = add_rn(add_rn(sum[0], sum[1]), add_rn(sum[2], sum[3]));
#pragma unroll
    for (int mask = 4; mask >= 1; mask >>= 1) all = add_rn(all, shuffle_xor(all, mask));
    const float square = fma_rn(all, 1.0f / WIDTH, eps), inverse = inverse_root(square);
#pragma unroll
    for (int m = 0; m < QUADS; m++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            q.x[m][e] = mul_rn(mul_rn(q.x[m][e], inverse), w.x[m][e]);
    const float* at = by.table + angle * 2 * by.half;
    if (by.half == 32) rotate_quads<1>(q, at, l);
    else if (by.half == 64) rotate_quads<2>(q, at, l);
    else if (by.half == 128) rotate_quads<4>(q, at, l);
    else rotate_lanes(q, at, by.half, l);
}

// Rounded, into shared memory. For FP8 keys lane t's two pairs of each 16 columns are 4t, 4t + 1 and
// 4t + 2, 4t + 3, as four neighbouring bytes of a key are read.
DEVICE void store_query(u8* queries, int row, const Query& q, int l) {
#pragma unroll
    for (int m = 0; m < QUADS; m++) {
        u32 low = pack_bf16x2(q.x[m][0], q.x[m][1]), high = pack_bf16x2(q.x[m][2], q.x[m][3]);
        if (FP8) {
            low = pack_f16x2(bf16x2_low(low), bf16x2_high(low));
            high = pack_f16x2(bf16x2_low(high), bf16x2_high(high));
            const int chunk = 2 * (2 * m + l / 4), word = l & 3;
            reinterpret_cast<u32*>(queries + swizzled(row, chunk, QUERY_PITCH))[word] = low;
            reinterpret_cast<u32*>(queries + swizzled(row, chunk + 1, QUERY_PITCH))[word] = high;
        } else {
            u8* to = queries + swizzled(row, 4 * m + l / 2, QUERY_PITCH);
            reinterpret_cast<uint2*>(to)[l & 1] = make_uint2(low, high);
        }
    }
}
