// For the product with many rows: how a warp loads the weights of 16 of K x half an n-tile (32
// columns) and decodes them into matrix fragments.
#pragma once
#include "linear/packed_weight.cuh"

constexpr int NARROW = 3;  // kind of an NVFP4 n-tile that is stored as four narrow tiles
constexpr int STRIPS = 4;  // of 8 columns, in half an n-tile

// b0, b1 of each strip.
typedef u32 StripFragments[STRIPS][2];

// A lane's part of 16 of K x 32 columns, as stored (packed_weight.cuh).
template <int KIND> struct Packed {
    static constexpr int WORDS = KIND == BF16 ? 8 : KIND == FP8 ? 4 : 2;
    static constexpr int LOADS = KIND == NARROW ? 2 : (WORDS + 3) / 4;
    u32 words[WORDS];
    u32 scales[2];  // NVFP4: one word; NARROW: one word per narrow tile, for 32 of K

    // Offsets of this lane's first words and scales within an n-tile x 64 of K, bytes. `side`:
    // which half of the n-tile.
    DEVICE static u32 words_at(int side) {
        const u32 lane = threadIdx.x % 32;
        if (KIND == NVFP4) return lane * 16 + side * 8;
        return KIND == NARROW ? lane * 4 + side * 2 * NARROW_SLOT
                              : lane * 16 + side * LOADS * 512;
    }
    DEVICE static u32 scales_at(int side) {
        const u32 column = threadIdx.x % 32 / 4;
        return KIND == NVFP4 ? NVFP4_CODES + column * 32 + side * 4
                             : NARROW_CODES + column * 8 + side * 2 * NARROW_SLOT;
    }

    // Loads the 16 of K number `k16`; here `words_at` and `scales_at` are addresses.
    DEVICE void load(saddr words_at, saddr scales_at, int k16) {
        if (KIND == NVFP4) {
            const uint2 codes = load_shared8(words_at + k16 * 512);
            words[0] = codes.x, words[1] = codes.y;
            scales[0] = load_shared4(scales_at + k16 * 8);
            return;
        }
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            if (KIND == NARROW) {
                words[i] = load_shared4(words_at + k16 * 128 + i * NARROW_SLOT);
                scales[i] = load_shared4(scales_at + k16 / 2 * 4 + i * NARROW_SLOT);
            } else {
                const uint4 v = load_shared16(words_at + (k16 * 2 * LOADS + i) * 512);
                words[4 * i] = v.x, words[4 * i + 1] = v.y;
                words[4 * i + 2] = v.z, words[4 * i + 3] = v.w;
            }
        }
    }

    // A value that depends on every load, for barrier_arrive_received.
    DEVICE u32 last() const {
        u32 x = 0;
#pragma unroll
        for (int i = 0; i < WORDS; i += KIND == NARROW ? 1 : 4) x ^= words[i];
        if (KIND == NVFP4) x ^= scales[0];
        if (KIND == NARROW) x ^= scales[0] ^ scales[1];
        return x;
    }

    // `exponent`: SCALE_EXPONENT, see nvfp4_scales.
    DEVICE void decode(StripFragments& b, int k16, u32 exponent) const {
        if (KIND == NVFP4 || KIND == NARROW) {
            u32 scale[2];
            if (KIND == NVFP4) {
                nvfp4_scales(scales[0], scale, exponent);
            } else {
                scale[0] = nvfp4_scale(scales[0], k16 % 2, exponent);
                scale[1] = nvfp4_scale(scales[1], k16 % 2, exponent);
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                u32 pair[4];
                nvfp4_fragments(words[i], scale[i], pair);
                b[2 * i][0] = pair[0], b[2 * i][1] = pair[1];
                b[2 * i + 1][0] = pair[2], b[2 * i + 1][1] = pair[3];
            }
            return;
        }
#pragma unroll
        for (int i = 0; i < STRIPS; i++) {
            if (KIND == FP8) {
                fp8_fragments(words[i], b[i]);
            } else {
                b[i][0] = words[2 * i], b[i][1] = words[2 * i + 1];
            }
        }
    }
};
