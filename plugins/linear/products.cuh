// The products of one slot of weights with the rows of a chunk: sums[row tile][strip] += rows x
// weights, in order of k. `rows` is where load_matrix4 finds this lane's row at the slot's first k;
// 16 of K further is 32 bytes further.
#pragma once
#include "linear/ring.cuh"

typedef float Sums[ROW_TILES][8][4];
typedef u32 RowFragments[ROW_TILES][4];

DEVICE void load_fragments(RowFragments& a, saddr rows, int k16) {
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++) load_matrix4(a[m], rows + 32 * k16 + m * 16 * PITCH);
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

// 64 of K, the first or second half of the step.
DEVICE void add_nvfp4(Sums& sums, saddr slot, saddr rows, int part) {
    const u32 lane = threadIdx.x % 32;
    const saddr at = slot + lane * 16, scales = slot + NVFP4_CODES + lane / 4 * 32;
    const uint4 s0 = load_shared16(scales), s1 = load_shared16(scales + 16);
    const u32 s[8] = {s0.x, s0.y, s0.z, s0.w, s1.x, s1.y, s1.z, s1.w};
#pragma unroll
    for (int k16 = 0; k16 < 4; k16++) {
        const uint4 codes = load_shared16(at + 512 * k16);
        RowFragments a;
        load_fragments(a, rows, 4 * part + k16);
        add_nvfp4_words(sums, a, codes, s[2 * k16], s[2 * k16 + 1]);
    }
}

// 32 of K, one quarter of the step.
DEVICE void add_fp8(Sums& sums, saddr slot, saddr rows, int part) {
    const saddr at = slot + threadIdx.x % 32 * 16;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        RowFragments a;
        load_fragments(a, rows, 2 * part + i);
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

// 16 of K, one eighth of the step.
DEVICE void add_bf16(Sums& sums, saddr slot, saddr rows, int part) {
    const saddr at = slot + threadIdx.x % 32 * 16;
    RowFragments a;
    load_fragments(a, rows, part);
#pragma unroll
    for (int h = 0; h < 4; h++) {
        const uint4 b = load_shared16(at + 512 * h);
        add_strip(sums, a, 2 * h, b.x, b.y);
        add_strip(sums, a, 2 * h + 1, b.z, b.w);
    }
}
