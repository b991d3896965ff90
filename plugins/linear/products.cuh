// The products of one slot of weights with the rows of its stage: sums[row tile][strip] += rows x
// weights, in order of k. `rows` is where load_matrix4 finds this lane's row in the slot's slab, at
// the slab's first k; 16 of K further is that ^ 32 bytes.
#pragma once
#include "linear/ring.cuh"

typedef float Sums[ROW_TILES][8][4];
typedef float NarrowSums[ROW_TILES][2][4];
typedef u32 RowFragments[ROW_TILES][4];

DEVICE void load_fragments(RowFragments& a, saddr rows, int k16) {
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++) load_matrix4(a[m], (rows ^ 32 * k16) + m * 16 * SLAB_ROW);
}

// Of what was loaded, for `received`.
DEVICE u32 last_of(const RowFragments& a) {
    u32 x = 0;
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++) x ^= a[m][0];
    return x;
}
// Of sums in which every load has a part.
DEVICE u32 last_of(const Sums& sums) {
    u32 x = 0;
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++) {
#pragma unroll
        for (int j = 0; j < 8; j += 2) x ^= float_bits(sums[m][j][0]);
    }
    return x;
}

DEVICE void copy_fragments(RowFragments& to, const RowFragments& from) {
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++) {
#pragma unroll
        for (int i = 0; i < 4; i++) to[m][i] = from[m][i];
    }
}

DEVICE void add_strip(Sums& sums, const RowFragments& a, int strip, u32 b0, u32 b1) {
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++) mma_bf16(sums[m][strip], a[m], b0, b1);
}

DEVICE void add_nvfp4_words(Sums& sums, const RowFragments& a, const uint4& codes, u32 s0, u32 s1) {
    const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int h = 0; h < 2; h++) {
        u32 scale[2];
        nvfp4_scales(h ? s1 : s0, scale);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            u32 b[4];
            nvfp4_fragments(words[2 * h + j], scale[j], b);
            add_strip(sums, a, 4 * h + 2 * j, b[0], b[1]);
            add_strip(sums, a, 4 * h + 2 * j + 1, b[2], b[3]);
        }
    }
}

// What a lane holds of a slot of 64 of K: the scales, and codes and rows of the 16 in turn. Those of
// the next 16, or of the next slot, are loaded before the products of these are made.
struct Nvfp4 {
    uint4 scales[2];
    uint4 codes;
    RowFragments a;

    DEVICE void load(saddr slot, saddr rows, int k16) {
        const u32 lane = threadIdx.x % 32;
        codes = load_shared16(slot + 512 * k16 + 16 * lane);
        load_fragments(a, rows, k16);
    }
    // Of the last loads.
    DEVICE u32 last() const { return codes.x ^ last_of(a); }
    DEVICE void load_scales(saddr slot) {
        const saddr at = slot + NVFP4_CODES + threadIdx.x % 32 / 4 * 32;
        scales[0] = load_shared16(at);
        scales[1] = load_shared16(at + 16);
    }
    DEVICE void add(Sums& sums, int k16) const {
        const uint4& s = scales[k16 / 2];
        add_nvfp4_words(sums, a, codes, k16 % 2 ? s.z : s.x, k16 % 2 ? s.w : s.y);
    }
};

// What a lane holds of a narrow slot: 16 of K, the same for the whole item.
struct Narrow {
    u32 codes, scales;
    RowFragments a;

    DEVICE void load(saddr slot, saddr rows, int k16) {
        const u32 lane = threadIdx.x % 32;
        codes = load_shared4(slot + 128 * k16 + 4 * lane);
        scales = load_shared4(slot + NARROW_CODES + lane / 4 * 8 + k16 / 2 * 4);
        load_fragments(a, rows, k16);
    }
    DEVICE u32 last() const { return codes ^ scales ^ last_of(a); }
    DEVICE void add(NarrowSums& sums, int k16) const {
        u32 b[4];
        nvfp4_fragments(codes, nvfp4_scale(scales, k16 % 2), b);
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++) {
            mma_bf16(sums[m][0], a[m], b[0], b[1]);
            mma_bf16(sums[m][1], a[m], b[2], b[3]);
        }
    }
};

// 32 of K.
DEVICE void add_fp8(Sums& sums, saddr slot, saddr rows) {
    const saddr at = slot + threadIdx.x % 32 * 16;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        RowFragments a;
        load_fragments(a, rows, i);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const uint4 codes = load_shared16(at + 1024 * i + 512 * h);
            const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                u32 b[2];
                fp8_fragments(words[j], b);
                add_strip(sums, a, 4 * h + j, b[0], b[1]);
            }
        }
    }
}

// 16 of K; `half`: of four strips, which lie together.
DEVICE void add_bf16(Sums& sums, saddr slot, saddr rows, bool half) {
    const saddr at = slot + threadIdx.x % 32 * 16;
    RowFragments a;
    load_fragments(a, rows, 0);
#pragma unroll
    for (int h = 0; h < 4; h++) {
        if (h == 2 && half) return;
        const uint4 b = load_shared16(at + 512 * h);
        add_strip(sums, a, 2 * h, b.x, b.y);
        add_strip(sums, a, 2 * h + 1, b.z, b.w);
    }
}

// What a warp takes at once of kinds that are not NVFP4, from 16 of K number `k16` of a slab on.
DEVICE void add_slot(Sums& sums, saddr slot, saddr rows, int k16, const Item& item) {
    if ((KINDS & 1 << FP8) && item.kind == FP8) add_fp8(sums, slot, rows ^ 32 * k16);
    if (!(KINDS & 1 << BF16) || item.kind != BF16) return;
    add_bf16(sums, slot, rows ^ 32 * k16, item.half);
    if (item.half) add_bf16(sums, slot + PLAIN_SLOT / 2, rows ^ 32 * (k16 + 1), true);
}

template <int STRIPS> DEVICE void clear(float (&sums)[ROW_TILES][STRIPS][4]) {
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++) {
#pragma unroll
        for (int j = 0; j < STRIPS; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) sums[m][j][i] = 0.0f;
        }
    }
}
