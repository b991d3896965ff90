// One head of D elements spread over a warp: RMSNorm and rotary position embedding in float32.
// A lane holds units u = lane, lane + 32, ... of D / 4. A unit is two neighbouring elements of the
// lower half of the rotated elements (or, past these, of the others) and their two partners in the
// upper half.
//
// Compile-time: ROTARY, the number of rotated elements of a head (a multiple of 4).
#pragma once
#include "cuda/device.cuh"

#ifndef ROTARY
#error "ROTARY must be defined"
#endif

template <int D> struct Head {
    static constexpr int UNITS = (D / 4 + 31) / 32;
    float x[UNITS][4];  // low, low + 1, high, high + 1
};

// Cosine and sine of a lane's angles, two per unit.
template <int D> struct Rotation {
    float cosine[Head<D>::UNITS][2], sine[Head<D>::UNITS][2];
};

template <int D> DEVICE int unit_of(int i) { return i * 32 + static_cast<int>(threadIdx.x % 32); }

// First element of unit u's lower pair and of its upper pair. Elements from ROTARY on are paired
// among themselves, with frequency 0.
template <int D> DEVICE int low_of(int u) {
    return ROTARY == D || 2 * u < ROTARY / 2 ? 2 * u : 2 * u + ROTARY / 2;
}
template <int D> DEVICE int high_of(int u) {
    return ROTARY == D || 2 * u < ROTARY / 2 ? 2 * u + ROTARY / 2 : 2 * u + D / 2;
}

// sin and cos of 0 <= angle < 2^18, to 2^-22. Multiples of pi / 2, in three parts, are subtracted
// from the angle first; for angles this large, CUDA's functions use a table in local memory.
DEVICE void sine_cosine(float angle, float& sine, float& cosine) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    float shifted = add_rn(mul_rn(angle, 0.636619772f), magic);
    float quarters = add_rn(shifted, -magic);
    float r = fma_rn(quarters, -1.57079637050628662109375f, angle);
    r = fma_rn(quarters, 4.37113900018624283e-8f, r);
    r = fma_rn(quarters, 1.71512449e-15f, r);
    float r2 = r * r;
    float s = fma_rn(r2, -1.9515295891e-4f, 8.3321608736e-3f);
    s = fma_rn(fma_rn(s, r2, -1.6666654611e-1f), r * r2, r);
    float c = fma_rn(r2, 2.443315711809948e-5f, -1.388731625493765e-3f);
    c = fma_rn(fma_rn(c, r2, 4.166664568298827e-2f), r2 * r2, fma_rn(r2, -0.5f, 1.0f));
    u32 quadrant = float_bits(shifted);
    float first = quadrant & 1u ? c : s;
    float second = quadrant & 1u ? s : c;
    sine = quadrant & 2u ? -first : first;
    cosine = (quadrant + 1u) & 2u ? -second : second;
}

// A lane's part of the frequencies, float32 [D / 2], radians per position.
template <int D> struct Frequencies {
    float x[Head<D>::UNITS][2];
};

template <int D> DEVICE Frequencies<D> load_frequencies(const float* from) {
    Frequencies<D> f;
#pragma unroll
    for (int i = 0; i < Head<D>::UNITS; i++) {
        int u = unit_of<D>(i);
        f.x[i][0] = u < D / 4 ? from[2 * u] : 0.0f;
        f.x[i][1] = u < D / 4 ? from[2 * u + 1] : 0.0f;
    }
    return f;
}

// The angle is rounded to float32, as in every other implementation here.
template <int D> DEVICE Rotation<D> rotation_at(const Frequencies<D>& frequencies, int position) {
    Rotation<D> rotation;
    float at = static_cast<float>(position);
#pragma unroll
    for (int i = 0; i < Head<D>::UNITS; i++)
#pragma unroll
        for (int j = 0; j < 2; j++)
            sine_cosine(mul_rn(at, frequencies.x[i][j]), rotation.sine[i][j], rotation.cosine[i][j]);
    return rotation;
}

// A head as stored in memory; its loads may still be in flight until it is unpacked.
template <int D> struct Packed {
    u32 low[Head<D>::UNITS], high[Head<D>::UNITS];
};

template <int D> DEVICE Packed<D> load_packed(const u16* from) {
    Packed<D> p;
#pragma unroll
    for (int i = 0; i < Head<D>::UNITS; i++) {
        int u = unit_of<D>(i);
        p.low[i] = p.high[i] = 0;
        if (u < D / 4) {
            p.low[i] = *reinterpret_cast<const u32*>(from + low_of<D>(u));
            p.high[i] = *reinterpret_cast<const u32*>(from + high_of<D>(u));
        }
    }
    return p;
}

template <int D> DEVICE Head<D> unpacked(const Packed<D>& p) {
    Head<D> h;
#pragma unroll
    for (int i = 0; i < Head<D>::UNITS; i++) {
        h.x[i][0] = bf16x2_low(p.low[i]);
        h.x[i][1] = bf16x2_high(p.low[i]);
        h.x[i][2] = bf16x2_low(p.high[i]);
        h.x[i][3] = bf16x2_high(p.high[i]);
    }
    return h;
}

template <int D> DEVICE Head<D> load_head(const u16* from) {
    return unpacked<D>(load_packed<D>(from));
}

// A norm's weight, bf16 or float32 [D].
template <int D> DEVICE Head<D> load_weight(const void* from, bool wide) {
    if (!wide) return load_head<D>(static_cast<const u16*>(from));
    Head<D> h;
    const float* at = static_cast<const float*>(from);
#pragma unroll
    for (int i = 0; i < Head<D>::UNITS; i++) {
        int u = unit_of<D>(i);
        bool in = u < D / 4;
        int low = low_of<D>(u), high = high_of<D>(u);
        h.x[i][0] = in ? at[low] : 0.0f;
        h.x[i][1] = in ? at[low + 1] : 0.0f;
        h.x[i][2] = in ? at[high] : 0.0f;
        h.x[i][3] = in ? at[high + 1] : 0.0f;
    }
    return h;
}

// x / rms(x) * weight, rotated, for N heads, interleaved because each is a chain of dependent
// shuffles. Every lane of the warp must take part.
template <int D, int N>
DEVICE void norm_and_rotate(Head<D> (&h)[N], const Head<D>& weight, const Rotation<D> (&rotation)[N],
                          float eps) {
    float sum[N];
#pragma unroll
    for (int n = 0; n < N; n++) {
        sum[n] = 0.0f;
#pragma unroll
        for (int i = 0; i < Head<D>::UNITS; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) sum[n] = fma_rn(h[n].x[i][j], h[n].x[i][j], sum[n]);
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2)
#pragma unroll
        for (int n = 0; n < N; n++) sum[n] += shuffle_xor(sum[n], mask);
#pragma unroll
    for (int n = 0; n < N; n++) {
        const float scale = rsqrtf(sum[n] * (1.0f / D) + eps);
#pragma unroll
        for (int i = 0; i < Head<D>::UNITS; i++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float& low = h[n].x[i][j];
                float& high = h[n].x[i][j + 2];
                const float a = low * scale * weight.x[i][j];
                const float b = high * scale * weight.x[i][j + 2];
                const float c = rotation[n].cosine[i][j], s = rotation[n].sine[i][j];
                low = fma_rn(a, c, -(b * s));
                high = fma_rn(b, c, a * s);
            }
    }
}
