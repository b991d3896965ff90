// What a warp of the product with many rows loads for 16 of K, and how it becomes matrix fragments.
#pragma once
#include "linear/units.cuh"

constexpr int NARROW = 3;       // the kind of an n-tile that is stored as four narrow ones
constexpr int ROW_BYTES = 128;  // of 64 of K

// The same word of four narrow tiles.
DEVICE uint4 load_narrow(saddr p) {
    return make_uint4(load_shared4(p), load_shared4(p + NARROW_SLOT),
                      load_shared4(p + 2 * NARROW_SLOT), load_shared4(p + 3 * NARROW_SLOT));
}
DEVICE u32 word_of(const uint4& v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// One warp's share of a slot for 16 of K, as loaded: 16 M rows, and 64 columns still packed.
template <int KIND, int M> struct Fragments {
    static constexpr int LOADS = KIND == NARROW ? 1 : slots_of(KIND);
    u32 rows[M][4];
    uint4 packed[LOADS];
    uint4 scales;  // NVFP4: of two k16

    // `rows_at`: this lane's row and half in the slot. `before`: of the 16 of K before.
    DEVICE void load(saddr rows_at, saddr unit, int k16, const Fragments& before) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int m = 0; m < M; m++)
            load_matrix4(rows[m], (rows_at ^ (k16 << 5)) + m * 16 * ROW_BYTES);
        if (KIND == NARROW) {
            packed[0] = load_narrow(unit + k16 * 128 + lane * 4);
            scales = k16 % 2 ? before.scales
                             : load_narrow(unit + NARROW_CODES + lane / 4 * 8 + k16 / 2 * 4);
            return;
        }
#pragma unroll
        for (int i = 0; i < LOADS; i++)
            packed[i] = load_shared16(unit + (k16 * LOADS + i) * 512 + lane * 16);
        if (KIND != NVFP4) return;
        scales = k16 % 2 ? before.scales
                         : load_shared16(unit + NVFP4_CODES + lane / 4 * 32 + k16 * 8);
    }

    // Of every load, for `received`.
    DEVICE u32 last() const {
        u32 x = 0;
#pragma unroll
        for (int m = 0; m < M; m++) x ^= rows[m][0];
#pragma unroll
        for (int i = 0; i < LOADS; i++) x ^= packed[i].x;
        if (KIND == NVFP4 || KIND == NARROW) x ^= scales.x;
        return KIND == NARROW ? x ^ packed[0].y ^ packed[0].z ^ packed[0].w ^ scales.y ^ scales.z ^
                                    scales.w
                              : x;
    }

    // b0, b1 of strip 2 j and of strip 2 j + 1.
    DEVICE void strips(u32 (&b)[4], int k16, int j) const {
        if (KIND == NVFP4) {
            u32 pair[2];
            nvfp4_scales(word_of(scales, k16 % 2 * 2 + j / 2), pair);
            nvfp4_fragments(word_of(packed[0], j), pair[j % 2], b);
        } else if (KIND == NARROW) {
            const u32 pair = nvfp4_scale(word_of(scales, j), k16 % 2);
            nvfp4_fragments(word_of(packed[0], j), pair, b);
        } else if (KIND == FP8) {
            const uint4 words = packed[j / 2];
            u32 even[2], odd[2];
            fp8_fragments(j % 2 ? words.z : words.x, even);
            fp8_fragments(j % 2 ? words.w : words.y, odd);
            b[0] = even[0];
            b[1] = even[1];
            b[2] = odd[0];
            b[3] = odd[1];
        } else {
            b[0] = packed[j].x;
            b[1] = packed[j].y;
            b[2] = packed[j].z;
            b[3] = packed[j].w;
        }
    }
};
