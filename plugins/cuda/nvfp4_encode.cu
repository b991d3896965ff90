// Encodes weights in NVFP4: for each block of 16 the E4M3 scale, rounded or searched, and the codes.
// The same bits as calib/quantize/nvfp4.py, whose order of operations this follows: every quotient,
// product and sum is rounded, and none is fused.
#include "cuda/device.cuh"

constexpr int GROUP = 16;
constexpr int TINIEST = 1, TOP = 126;  // E4M3: 2^-9 and 448
constexpr float ROUND = 12582912.0f;   // 1.5 * 2^23: x + ROUND - ROUND is x rounded to an integer

// WIDE: rows are float32, else bf16.
#if WIDE
typedef float Weight;
DEVICE void load(const float* from, float* x) {
#pragma unroll
    for (int i = 0; i < GROUP; i++) x[i] = from[i];
}
#else
typedef u16 Weight;
DEVICE void load(const u16* from, float* x) {
    const uint4* pairs = reinterpret_cast<const uint4*>(from);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint4 four = pairs[i];
        const u32 words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            x[8 * i + 2 * j] = bf16x2_low(words[j]);
            x[8 * i + 2 * j + 1] = bf16x2_high(words[j]);
        }
    }
}
#endif

DEVICE float magnitude(float x) { return bits_float(float_bits(x) & 0x7fffffffu); }

// A magnitude rounded to an E2M1 value, ties to the even code. NaN stays NaN.
DEVICE float to_code(float y) {
    y = y > 6.0f ? 6.0f : y;
    const float power = bits_float(float_bits(y) & 0x7f800000u);
    const float step = 0.5f * (power < 1.0f ? 1.0f : power > 4.0f ? 4.0f : power);
    return mul_rn(add_rn(add_rn(y / step, ROUND), -ROUND), step);
}

template <int HALF>
DEVICE void halve(float* sum) {
#pragma unroll
    for (int i = 0; i < HALF; i++) sum[i] = add_rn(sum[i], sum[i + HALF]);
}

// Sum of squared errors with one scale; `factors` may be null.
DEVICE float loss(const float* x, float step, const float* factors) {
    float sum[GROUP];
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
        const float size = magnitude(x[i]);
        const float error = add_rn(size, -mul_rn(to_code(size / step), step));
        sum[i] = mul_rn(error, error);
        if (factors) sum[i] = mul_rn(sum[i], factors[i]);
    }
    halve<8>(sum);
    halve<4>(sum);
    halve<2>(sum);
    return add_rn(sum[0], sum[1]);
}

// The byte that puts the largest value on code 6.
DEVICE int rounded_scale(float largest, float six) {
    float scale = largest / six;
    if (scale == 0.0f) scale = 1.0f;
    scale = scale < 0.001953125f ? 0.001953125f : scale > 448.0f ? 448.0f : scale;
    return pack_e4m3x2(scale, 0.0f) & 0xff;
}

DEVICE u64 encoded(const float* x, float scale) {
    u64 codes = 0;
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
        const float y = x[i] / scale, size = magnitude(y);
        u32 code = y < 0.0f ? 8 : 0;  // also where it rounds to 0, but not for -0.0
        code += (size > 0.25f) + (size >= 0.75f) + (size > 1.25f) + (size >= 1.75f);
        code += (size > 2.5f) + (size >= 3.5f) + (size > 5.0f);
        codes |= static_cast<u64>(code) << (4 * i);
    }
    return codes;
}

// One thread a block of weights. rows [N, K]; factors float [K] or null; values float [127], of each
// E4M3 byte; steps float [127], the scale that a byte stands for in the search; codes u64 [N, K / 16];
// scales u8 [N, K / 16]; six: 6 * scale2. The search tries the bytes from + first to + last around
// the rounded one; first > last: none.
KERNEL void __launch_bounds__(256)
    nvfp4_encode(const Weight* rows, const float* factors, const float* values, const float* steps,
                 u64* codes, u8* scales, i32 blocks, i32 row_blocks, i32 first, i32 last,
                 float scale2, float six) {
    const int block = blockIdx.x * blockDim.x + threadIdx.x;
    if (block >= blocks) return;
    float x[GROUP];
    load(rows + static_cast<i64>(block) * GROUP, x);
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < GROUP; i++) largest = magnitude(x[i]) > largest ? magnitude(x[i]) : largest;
    int byte = rounded_scale(largest, six);
    if (first <= last) {
        const float* own = factors ? factors + block % row_blocks * GROUP : nullptr;
        const int start = largest > 0.0f ? byte : TINIEST;  // of equal candidates the lowest wins
        float least = bits_float(0x7f800000u);
        byte = 0;
        for (int offset = first; offset <= last; offset++) {
            const int tried = start + offset < TINIEST ? TINIEST
                              : start + offset > TOP   ? TOP
                                                       : start + offset;
            const float found = loss(x, steps[tried], own);
            if (found < least) {
                least = found;
                byte = tried;
            }
        }
    }
    scales[block] = static_cast<u8>(byte);
    codes[block] = encoded(x, mul_rn(values[byte], scale2));
}
