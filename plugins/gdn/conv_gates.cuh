// Operations on a row before the recurrence, shared by all gdn kernels: convolution, SiLU, gates.
#pragma once
#include "cuda/device.cuh"

constexpr int D = 128;    // key and value dimension of a head
constexpr int TAPS = 4;   // size of the convolution kernel
constexpr float NORM_EPSILON = 1e-6f;
constexpr float QUERY_SCALE = 0.08838834764831845f;  // D^-0.5

// Distance of a state from the address in the arguments, bytes (Shift of plugins/launch.py).
DEVICE i64 shift_of(const i64* shift) { return shift ? *shift : 0; }
template <typename T>
DEVICE void move(T*& place, i64 bytes) {
    if (place) place = reinterpret_cast<T*>(reinterpret_cast<u64>(place) + bytes);
}

// Element i of an unquantised parameter, float32 or bf16.
DEVICE float plain(const void* values, int i, bool f32) {
    return f32 ? static_cast<const float*>(values)[i]
               : bf16_float(static_cast<const u16*>(values)[i]);
}

// The convolution weights of two neighbouring channels, oldest tap first.
struct Taps {
    float low[TAPS], high[TAPS];
};

DEVICE Taps load_taps(const void* weights, int channel, bool f32) {
    Taps taps;
    if (f32) {
        const float4* at = static_cast<const float4*>(weights) + channel;
        const float4 a = at[0], b = at[1];
        taps.low[0] = a.x, taps.low[1] = a.y, taps.low[2] = a.z, taps.low[3] = a.w;
        taps.high[0] = b.x, taps.high[1] = b.y, taps.high[2] = b.z, taps.high[3] = b.w;
    } else {
        const uint4 x = *(static_cast<const uint4*>(weights) + channel / 2);
        taps.low[0] = bf16x2_low(x.x), taps.low[1] = bf16x2_high(x.x);
        taps.low[2] = bf16x2_low(x.y), taps.low[3] = bf16x2_high(x.y);
        taps.high[0] = bf16x2_low(x.z), taps.high[1] = bf16x2_high(x.z);
        taps.high[2] = bf16x2_low(x.w), taps.high[3] = bf16x2_high(x.w);
    }
    return taps;
}

DEVICE float sigmoid(float x) {
    return reciprocal_approx(add_rn(1.0f, exp2_approx(mul_rn(-1.4426950408889634f, x))));
}
DEVICE float silu(float x) { return mul_rn(x, sigmoid(x)); }

// The convolution's output for one row of two channels, from the inputs of that row and the three
// before it, oldest first.
DEVICE float2 convolved(const Taps& taps, u32 x0, u32 x1, u32 x2, u32 x3) {
    float low = mul_rn(taps.low[0], bf16x2_low(x0));
    float high = mul_rn(taps.high[0], bf16x2_high(x0));
    low = fma_rn(taps.low[1], bf16x2_low(x1), low);
    high = fma_rn(taps.high[1], bf16x2_high(x1), high);
    low = fma_rn(taps.low[2], bf16x2_low(x2), low);
    high = fma_rn(taps.high[2], bf16x2_high(x2), high);
    low = fma_rn(taps.low[3], bf16x2_low(x3), low);
    high = fma_rn(taps.high[3], bf16x2_high(x3), high);
    return make_float2(silu(low), silu(high));
}

// The convolution's inputs, bf16 [rows, channels], read in pairs of channels. Rows -3..-1 are the
// history: three rows of [tail | records] from row `folded` on.
struct Inputs {
    const u16 *rows, *tail, *records;
    int channels, folded;

    DEVICE const u16* row(int t) const {
        if (t >= 0) return rows + static_cast<i64>(t) * channels;
        const int at = folded + TAPS - 1 + t;
        return at < TAPS - 1 ? tail + at * channels
                             : records + static_cast<i64>(at - (TAPS - 1)) * channels;
    }
    DEVICE u32 pair(int t, int channel) const {
        return *reinterpret_cast<const u32*>(row(t) + channel);
    }
};

DEVICE float softplus(float x) { return add_rn(fmaxf(x, 0.0f), log1pf(expf(-fabsf(x)))); }

// exp(-exp(a_log) softplus(a + dt_bias))
DEVICE float decay_gate(float a, float a_log, float dt_bias) {
    return expf(mul_rn(-expf(a_log), softplus(add_rn(a, dt_bias))));
}

DEVICE float dot4(float4 a, float4 b) {
    return fma_rn(a.x, b.x, fma_rn(a.y, b.y, fma_rn(a.z, b.z, mul_rn(a.w, b.w))));
}

DEVICE float4 scaled4(float4 a, float s) {
    return make_float4(mul_rn(a.x, s), mul_rn(a.y, s), mul_rn(a.z, s), mul_rn(a.w, s));
}
