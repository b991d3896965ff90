// What a warp of the product with many rows loads of the weight for 16 of K, and how it becomes
// matrix fragments: half an n-tile, 32 columns.
#pragma once
#include "linear/units.cuh"

constexpr int NARROW = 3;  // the kind of an n-tile that is stored as four narrow ones
constexpr int STRIPS = 4;  // of 8 columns, in half an n-tile

// b0, b1 of each strip.
typedef u32 StripFragments[STRIPS][2];

// `unit`: of the n-tile in a stage, 64 of K; `side`: which half of its columns.
template <int KIND> struct Packed {
    static constexpr int WORDS = KIND == BF16 ? 8 : KIND == FP8 ? 4 : 2;
    u32 words[WORDS];
    u32 scales[2];  // NVFP4: one; NARROW: of each narrow tile

    DEVICE void load(saddr unit, int k16, int side) {
        const int lane = threadIdx.x % 32;
        if (KIND == NVFP4) {
            const uint2 codes = load_shared8(unit + k16 * 512 + lane * 16 + side * 8);
            words[0] = codes.x, words[1] = codes.y;
            scales[0] = load_shared4(unit + NVFP4_CODES + lane / 4 * 32 + k16 * 8 + side * 4);
        } else if (KIND == NARROW) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const saddr tile = unit + (2 * side + i) * NARROW_SLOT;
                words[i] = load_shared4(tile + k16 * 128 + lane * 4);
                scales[i] = load_shared4(tile + NARROW_CODES + lane / 4 * 8 + k16 / 2 * 4);
            }
        } else {
            constexpr int LOADS = WORDS / 4;
#pragma unroll
            for (int i = 0; i < LOADS; i++) {
                const int eighth = (k16 * 2 + side) * LOADS + i;
                const uint4 v = load_shared16(unit + eighth * 512 + lane * 16);
                words[4 * i] = v.x, words[4 * i + 1] = v.y;
                words[4 * i + 2] = v.z, words[4 * i + 3] = v.w;
            }
        }
    }

    // Of every load, for `received`.
    DEVICE u32 last() const {
        u32 x = 0;
#pragma unroll
        for (int i = 0; i < WORDS; i += KIND == NARROW ? 1 : 4) x ^= words[i];
        if (KIND == NVFP4) x ^= scales[0];
        if (KIND == NARROW) x ^= scales[0] ^ scales[1];
        return x;
    }

    DEVICE void decode(StripFragments& b, int k16) const {
        if (KIND == NVFP4 || KIND == NARROW) {
            u32 scale[2];
            if (KIND == NVFP4) {
                nvfp4_scales(scales[0], scale);
            } else {
                scale[0] = nvfp4_scale(scales[0], k16 % 2);
                scale[1] = nvfp4_scale(scales[1], k16 % 2);
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
