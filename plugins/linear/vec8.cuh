// Eight neighbouring columns of a row, which a thread processes at a time.
#pragma once
#include "cuda/device.cuh"

DEVICE void unpack8(float (&to)[8], uint4 from) {
    const u32 words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        to[2 * i] = bf16x2_low(words[i]);
        to[2 * i + 1] = bf16x2_high(words[i]);
    }
}

DEVICE uint4 pack8(const float (&v)[8]) {
    return make_uint4(pack_bf16x2(v[0], v[1]), pack_bf16x2(v[2], v[3]), pack_bf16x2(v[4], v[5]),
                      pack_bf16x2(v[6], v[7]));
}

// The sum over a block of WARPS warps, for every thread.
template <int WARPS> DEVICE float block_sum(float sum, float* parts) {
#pragma unroll
    for (int mask = 16; mask; mask /= 2) sum += shuffle_xor(sum, mask);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
    sync_block();
    sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += parts[w];
    return sum;
}

DEVICE float squares8(uint4 x) {
    float v[8];
    unpack8(v, x);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) sum = fma_rn(v[i], v[i], sum);
    return sum;
}

// offset + weight for the eight columns from `column` on; the weight is float32 or bf16.
template <bool FLOAT>
DEVICE void norm_weights8(float (&w)[8], const void* weight, int column, float offset) {
    if (FLOAT) {
        const float* const at = static_cast<const float*>(weight) + column;
        const float4* const from = reinterpret_cast<const float4*>(at);
        const float4 a = from[0], b = from[1];
        w[0] = a.x, w[1] = a.y, w[2] = a.z, w[3] = a.w;
        w[4] = b.x, w[5] = b.y, w[6] = b.z, w[7] = b.w;
    } else {
        unpack8(w, *reinterpret_cast<const uint4*>(static_cast<const u16*>(weight) + column));
    }
#pragma unroll
    for (int i = 0; i < 8; i++) w[i] = offset + w[i];
}
