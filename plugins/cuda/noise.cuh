// Counter-based noise of sampling: see plugins/numpy_noise.py, which has the same bits. Every float
// operation is rounded once: the compiler must not contract them.
#pragma once
#include "cuda/device.cuh"

constexpr u32 NOISE_TARGET = 0, NOISE_DRAFT = 1, NOISE_ACCEPT = 2, NOISE_RESIDUAL = 3;

struct Seed {
    u32 low, high;
};

// Philox4x32-10.
DEVICE uint4 philox(uint4 x, Seed key) {
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const u64 p0 = static_cast<u64>(0xd2511f53u) * x.x;
        const u64 p1 = static_cast<u64>(0xcd9e8d57u) * x.z;
        x = make_uint4(static_cast<u32>(p1 >> 32) ^ x.y ^ key.low, static_cast<u32>(p1),
                       static_cast<u32>(p0 >> 32) ^ x.w ^ key.high, static_cast<u32>(p0));
        key.low += 0x9e3779b9u;
        key.high += 0xbb67ae85u;
    }
    return x;
}

// The words of ids 4 * quad .. 4 * quad + 3 at an absolute position.
DEVICE uint4 noise_words(Seed seed, int position, u32 quad, u32 purpose = NOISE_TARGET) {
    return philox(make_uint4(quad, static_cast<u32>(position), purpose, 0), seed);
}

// k ln(2) + ln(1 + t).
DEVICE float log_of(float k, float t) {
    const float s = mul_rn(t, t);
    float r = 0.0870043486f;
    r = add_rn(mul_rn(r, t), -0.142674863f);
    r = add_rn(mul_rn(r, t), 0.149147689f);
    r = add_rn(mul_rn(r, t), -0.16577585f);
    r = add_rn(mul_rn(r, t), 0.199630633f);
    r = add_rn(mul_rn(r, t), -0.250013381f);
    r = add_rn(mul_rn(r, t), 0.333339095f);
    r = mul_rn(mul_rn(r, t), s);
    r = add_rn(r, mul_rn(k, -2.12194440e-4f));
    r = add_rn(r, -mul_rn(0.5f, s));
    r = add_rn(t, r);
    return add_rn(r, mul_rn(k, 0.693359375f));
}

// Splits a normal positive number into 2^k (1 + t) with 1 + t in [sqrt(1/2), sqrt(2)).
DEVICE float log_parts(float x, float& k) {
    const i32 bits = static_cast<i32>(float_bits(x));
    const i32 exponent = (bits - 0x3f3504f3) >> 23;
    k = static_cast<float>(exponent);
    return add_rn(bits_float(static_cast<u32>(bits - (exponent << 23))), -1.0f);
}

// Natural logarithm of a normal positive number.
DEVICE float log_rn(float x) {
    float k;
    const float t = log_parts(x, k);
    return log_of(k, t);
}

// e^z for z <= 0; 0 below -87.
DEVICE float exp_rn(float z) {
    const float inside = z > -87.0f ? z : -87.0f;
    const float k = rintf(mul_rn(inside, 1.44269504f));
    const float r = add_rn(add_rn(inside, -mul_rn(k, 0.693359375f)), -mul_rn(k, -2.12194440e-4f));
    float p = 0.00139504788f;
    p = add_rn(mul_rn(p, r), 0.00836888235f);
    p = add_rn(mul_rn(p, r), 0.041666206f);
    p = add_rn(mul_rn(p, r), 0.166665196f);
    p = add_rn(mul_rn(p, r), 0.5f);
    p = add_rn(mul_rn(p, r), 1.0f);
    p = add_rn(mul_rn(p, r), 1.0f);
    const float scale = bits_float(static_cast<u32>((static_cast<i32>(k) + 127) << 23));
    return z < -87.0f ? 0.0f : mul_rn(p, scale);
}

// -ln(1 - u) with u = (word + 1/2) / 2^32.
DEVICE float exponential(u32 word) {
    const bool near = word < 1257966796u;  // 1 - u >= sqrt(1/2)
    const float x = mul_rn(add_rn(static_cast<float>(near ? word : ~word), 0.5f), 0x1p-32f);
    float k;
    float t = log_parts(near ? 1.0f : x, k);
    if (near) t = -x;
    return -log_of(k, t);
}

// Standard Gumbel noise.
DEVICE float gumbel(u32 word) { return -log_rn(exponential(word)); }
