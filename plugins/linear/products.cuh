// The products of one slot of weights with the rows of its stage: sums[row tile][strip] += rows x
// weights, in order of k. `rows` is where load_matrix4 finds this lane's row in the slot's slab, at
// the slab's first k; 16 of K further is that ^ 32 bytes.
#pragma once
#include "linear/ring.cuh"

typedef float Sums[ROW_TILES][STRIPS][4];
typedef float NarrowSums[2][4];  // of one row tile
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
        for (int j = 0; j < STRIPS; j += 2) x ^= float_bits(sums[m][j][0]);
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

// What a lane holds of a slot of 64 of K: codes and rows of the 16 in turn. Those of the next 16, or
// of the next slot, are loaded before the products of these are made. With whole n-tiles also the
// scales of all 64, which come by 16 bytes; with halves of them those of the 16.
struct Nvfp4 {
    static constexpr int SCALED = SPLIT > 1 ? 1 : 4;  // of 16 of K
    u32 scales[SCALED][STRIPS / 4];
    u32 codes[STRIPS / 2];
    RowFragments a;

    DEVICE void load(saddr slot, saddr rows, int k16, int side) {
        const u32 lane = threadIdx.x % 32;
        const saddr at = slot + 512 * k16 + 16 * lane;
#if ROW_TILES == 1
        unpack(codes, load_shared16(at));
#else
        const uint2 words = load_shared8(at + 8 * side);
        codes[0] = words.x, codes[1] = words.y;
        scales[0][0] = load_shared4(slot + NVFP4_CODES + lane / 4 * 32 + 8 * k16 + 4 * side);
#endif
        load_fragments(a, rows, k16);
    }
    DEVICE void load_scales(saddr slot) {
#if ROW_TILES == 1
        const saddr at = slot + NVFP4_CODES + threadIdx.x % 32 / 4 * 32;
        unpack(&scales[0][0], load_shared16(at));
        unpack(&scales[2][0], load_shared16(at + 16));
#endif
    }
    DEVICE static void unpack(u32* to, const uint4& from) {
        to[0] = from.x, to[1] = from.y, to[2] = from.z, to[3] = from.w;
    }
    // Of the last loads.
    DEVICE u32 last() const { return codes[0] ^ last_of(a) ^ (SPLIT > 1 ? scales[0][0] : 0); }
    DEVICE void follow(const Nvfp4& next) {
#pragma unroll
        for (int i = 0; i < STRIPS / 2; i++) codes[i] = next.codes[i];
        if (SPLIT > 1) scales[0][0] = next.scales[0][0];
        copy_fragments(a, next.a);
    }
    DEVICE void add(Sums& sums, int k16) const {
#pragma unroll
        for (int h = 0; h < STRIPS / 4; h++) {
            u32 scale[2];
            nvfp4_scales(scales[k16 % SCALED][h], scale);
#pragma unroll
            for (int j = 0; j < 2; j++) {
                u32 b[4];
                nvfp4_fragments(codes[2 * h + j], scale[j], b);
                add_strip(sums, a, 4 * h + 2 * j, b[0], b[1]);
                add_strip(sums, a, 4 * h + 2 * j + 1, b[2], b[3]);
            }
        }
    }
};

// What a lane holds of a narrow slot: 16 of K, the same for the whole item, and these of a row
// tile.
struct Narrow {
    u32 codes, scales;
    u32 a[4];

    DEVICE void load(saddr slot, saddr rows, int k16) {
        const u32 lane = threadIdx.x % 32;
        codes = load_shared4(slot + 128 * k16 + 4 * lane);
        scales = load_shared4(slot + NARROW_CODES + lane / 4 * 8 + k16 / 2 * 4);
        load_matrix4(a, rows ^ 32 * k16);
    }
    DEVICE u32 last() const { return codes ^ scales ^ a[0]; }
    DEVICE void add(NarrowSums& sums, int k16) const {
        u32 b[4];
        nvfp4_fragments(codes, nvfp4_scale(scales, k16 % 2), b);
        mma_bf16(sums[0], a, b[0], b[1]);
        mma_bf16(sums[1], a, b[2], b[3]);
    }
};

// 32 of K.
DEVICE void add_fp8(Sums& sums, saddr slot, saddr rows, int side) {
    const saddr at = slot + threadIdx.x % 32 * 16 + 512 * side;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        RowFragments a;
        load_fragments(a, rows, i);
#pragma unroll
        for (int h = 0; h < STRIPS / 4; h++) {
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
DEVICE void add_bf16(Sums& sums, saddr slot, saddr rows, bool half, int side) {
    const saddr at = slot + threadIdx.x % 32 * 16 + 1024 * side;
    RowFragments a;
    load_fragments(a, rows, 0);
#pragma unroll
    for (int h = 0; h < STRIPS / 2; h++) {
        if (h == 2 && half) return;
        const uint4 b = load_shared16(at + 512 * h);
        add_strip(sums, a, 2 * h, b.x, b.y);
        add_strip(sums, a, 2 * h + 1, b.z, b.w);
    }
}

// What a warp takes at once of kinds that are not NVFP4, from 16 of K number `k16` of a slab on.
DEVICE void add_slot(Sums& sums, saddr slot, saddr rows, int k16, const Item& item, int side) {
    if ((KINDS & 1 << FP8) && item.kind == FP8) add_fp8(sums, slot, rows ^ 32 * k16, side);
    if (!(KINDS & 1 << BF16) || item.kind != BF16) return;
    add_bf16(sums, slot, rows ^ 32 * k16, item.half, side);
    if (item.half) add_bf16(sums, slot + PLAIN_SLOT / 2, rows ^ 32 * (k16 + 1), true, 0);
}

DEVICE void clear(Sums& sums) {
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++) {
#pragma unroll
        for (int j = 0; j < STRIPS; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) sums[m][j][i] = 0.0f;
        }
    }
}
DEVICE void clear_narrow(NarrowSums& sums) {
#pragma unroll
    for (int i = 0; i < 4; i++) sums[0][i] = sums[1][i] = 0.0f;
}
