// Fills memory with reproducible pseudo-random weights: element i depends only on seed and i.
#include "linear/packed_weight.cuh"

constexpr int THREADS = 256;
constexpr u32 SCALE_CODES = 0x78787878u;  // four E5M3 bytes of 0.5; their three low bits are free
constexpr float BYTES_MEAN = 510.0f;      // mean of a sum of four bytes; 1 / its deviation
constexpr float BYTES_UNIT = 0.00676587f;

// A bijection that mixes all 32 bits. Source: C. Wellons, lowbias32.
DEVICE u32 mixed(u32 x) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ x >> 16;
}
DEVICE u32 word(u32 key, u32 i) { return mixed(i * 0x9e3779b9u + key); }

// Mean 0, standard deviation 1, within 3.5: the scaled sum of four uniform bytes.
DEVICE float normal(u32 bits) {
    u32 pairs = (bits & 0x00ff00ffu) + (bits >> 8 & 0x00ff00ffu);
    return (static_cast<float>((pairs & 0xffffu) + (pairs >> 16)) - BYTES_MEAN) * BYTES_UNIT;
}

DEVICE u64 first_item() { return static_cast<u64>(blockIdx.x) * THREADS + threadIdx.x; }
DEVICE u64 stride() { return static_cast<u64>(gridDim.x) * THREADS; }

// Uniform codes, scales 0.5 .. 0.9375. `slot`: bytes of a slot, whole or narrow, of which 8/9 are
// codes and 1/9 scales.
KERNEL void __launch_bounds__(THREADS) fill_nvfp4(uint4* to, int slots, int seed, int slot) {
    let_next_start();
    wait_for_previous();
    u32 key = mixed(static_cast<u32>(seed));
    const int slot_units = slot / 16, code_units = slot_units / 9 * 8;
    u64 units = static_cast<u64>(slots) * slot_units;
    for (u64 i = first_item(); i < units; i += stride()) {
        u32 at = static_cast<u32>(i) * 4, x[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 bits = word(key, at + j);
            u32 scales = (bits & 0x07070707u) | SCALE_CODES;
            // The bytes of a stored scale word start at bit 4.
            x[j] = static_cast<int>(i % slot_units) < code_units ? bits : rotate_right(scales, 28);
        }
        to[i] = make_uint4(x[0], x[1], x[2], x[3]);
    }
}

// E4M3, standard deviation 1.
KERNEL void __launch_bounds__(THREADS) fill_fp8(u32* to, int words, int seed) {
    let_next_start();
    wait_for_previous();
    u32 key = mixed(static_cast<u32>(seed));
    for (u64 i = first_item(); i < static_cast<u64>(words); i += stride()) {
        u32 at = static_cast<u32>(i) * 4;
        u32 low = pack_e4m3x2(normal(word(key, at)), normal(word(key, at + 1)));
        u32 high = pack_e4m3x2(normal(word(key, at + 2)), normal(word(key, at + 3)));
        to[i] = low | high << 16;
    }
}

KERNEL void __launch_bounds__(THREADS)
fill_bf16(u16* to, int count, int seed, float mean, float deviation) {
    let_next_start();
    wait_for_previous();
    u32 key = mixed(static_cast<u32>(seed));
    u64 all = static_cast<u64>(count);
    for (u64 i = first_item() * 8; i < all; i += stride() * 8) {
        u32 x[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 at = static_cast<u32>(i) + 2 * j;
            x[j] = pack_bf16x2(fma_rn(normal(word(key, at)), deviation, mean),
                               fma_rn(normal(word(key, at + 1)), deviation, mean));
        }
        if (i + 8 <= all) {
            *reinterpret_cast<uint4*>(to + i) = make_uint4(x[0], x[1], x[2], x[3]);
            continue;
        }
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (i + j < all) to[i + j] = static_cast<u16>(x[j / 2] >> 16 * (j % 2));
    }
}

KERNEL void __launch_bounds__(THREADS)
fill_f32(float* to, int count, int seed, float mean, float deviation) {
    let_next_start();
    wait_for_previous();
    u32 key = mixed(static_cast<u32>(seed));
    for (u64 i = first_item(); i < static_cast<u64>(count); i += stride())
        to[i] = fma_rn(normal(word(key, static_cast<u32>(i))), deviation, mean);
}
