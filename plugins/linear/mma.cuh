// The products of one slot of weights with the rows of its stage: sums[row tile][strip] += rows x
// weights, in order of k. `rows` is the address for load_matrix4 of this lane's row in the slot's
// slab, at the slab's first k; the 16 of K number k16 are at rows ^ 32 * k16.
#pragma once
#include "linear/pipeline.cuh"

typedef float Sums[ROW_TILES][STRIPS][4];
typedef float NarrowSums[2][4];  // of one row tile
typedef u32 RowFragments[ROW_TILES][4];

DEVICE void load_fragments(RowFragments& a, saddr rows, int k16) {
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++) load_matrix4(a[m], (rows ^ 32 * k16) + m * 16 * SLAB_ROW);
}

// A value that depends on the loads, for `received`.
DEVICE u32 last_of(const RowFragments& a) {
    u32 x = 0;
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++) x ^= a[m][0];
    return x;
}
// A value that depends on every load that went into the sums, for `received`.
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

// A lane's registers for the current 16 of K of a slot: codes, rows and scales. Those of the next
// 16 of K, or of the next slot, are loaded before the products with these. If the warp computes
// whole n-tiles, the scales are those of the slot's 64 of K, loaded 16 bytes at a time; if it
// computes halves of n-tiles, only those of the 16 of K.
struct Nvfp4 {
    static constexpr int SCALED = SPLIT > 1 ? 1 : 4;  // number of 16 of K whose scales are held
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
    // A value that depends on the last loads, for `received`.
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

// A lane's registers for a narrow slot: one 16 of K, with the same k16 for the whole item, and the
// matching columns of one row tile.
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

// Adds the products of 32 of K.
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

// Adds the products of 16 of K. `half`: only four strips, which are contiguous.
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

// FP8 and bf16: adds the products of one slot, or of the halves of two, whose first 16 of K is
// number `k16` of the slab.
DEVICE void add_slot(Sums& sums, saddr slot, saddr rows, int k16, const WorkTile& item, int side) {
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
