// The packed weight, as layout.py and pack.py write it, and its decoding into matrix fragments.
//
// "64 of K" means 64 consecutive elements along K. A group is 64 x tiles packed columns of one
// kind, stored as [step of 128 of K][n-tile of 64 columns][half a step][slots]. A slot is the unit
// that one warp processes. Notation: lane l, g = l / 4, t = l % 4; strip j is the n-tile's columns
// 8j to 8j + 7; b0, b1 are the fragments of mma_bf16 for the 16 of K number k16:
//   NVFP4  64 of K, 2304 bytes: codes [k16: 4][lane][word j: 4], word j = strips 2j and 2j + 1,
//          then scales [g: 8][k16: 4][word: 2], word h = strips 4h.. of column g
//   FP8    32 of K, 2048 bytes: [k16: 2][h: 2][lane][word: 4], word j = strip 4h + j:
//          bytes k = 2t, 2t + 1 (b0), 2t + 8, 2t + 9 (b1)
//   BF16   16 of K, 2048 bytes: [h: 4][lane][word: 4] = b0, b1 of strip 2h, b0, b1 of strip 2h + 1
// Some NVFP4 n-tiles are stored narrow: each slot becomes four slots of 16 columns, so that a block
// can compute one of them alone:
//          64 of K, 576 bytes: codes [k16: 4][lane] of two strips, then scales [g: 8][word: 2],
//          word h = of k16 2h and 2h + 1
// The sums of a column are multiplied by its float32 `scales` at the end.
#pragma once
#include "linear/activation_slabs.cuh"

enum Kind { NVFP4 = 0, FP8 = 1, BF16 = 2 };

constexpr int STEP_K = 128;
constexpr int TILE_COLUMNS = 64;
constexpr int GROUP_TILES = 12;  // most n-tiles of a group
constexpr int NVFP4_SLOT = 2304;
constexpr int PLAIN_SLOT = 2048;
constexpr int NVFP4_CODES = 2048;  // bytes before the scales
constexpr int NARROW_SLOT = NVFP4_SLOT / 4;
constexpr int NARROW_CODES = NVFP4_CODES / 4;
constexpr int HALF_TILE = TILE_COLUMNS / 2;

// Slots of half a step; extent of a slot along K; bytes of a slot; bytes of one n-tile in one step.
DEVICE constexpr int slots_of(int kind) { return 1 << kind; }
DEVICE constexpr int slot_columns(int kind) { return STEP_K / 2 >> kind; }
DEVICE constexpr int slot_bytes(int kind) { return kind == NVFP4 ? NVFP4_SLOT : PLAIN_SLOT; }
DEVICE constexpr int step_bytes(int kind) { return 2 * slots_of(kind) * slot_bytes(kind); }

// Exponent bits, in both halves, that turn the E5M3 bits of a scale into a bf16 of 2^81 times its
// value. Passed in a register, so that a single lop3 does both the mask and the or.
constexpr u32 SCALE_EXPONENT = 0x60006000u;
// One word, the scales of four strips -> two words, one strip per half.
DEVICE void nvfp4_scales(u32 word, u32 (&scale)[2], u32 exponent = opaque(SCALE_EXPONENT)) {
    scale[0] = (word & 0x0ff00ff0u) | exponent;
    scale[1] = (rotate_right(word, 8) & 0x0ff00ff0u) | exponent;
}

// The same for only one of the two words, number `pair`.
DEVICE u32 nvfp4_scale(u32 word, int pair, u32 exponent = opaque(SCALE_EXPONENT)) {
    return (rotate_right(word, 8 * pair) & 0x0ff00ff0u) | exponent;
}

// One word of codes and its two scales -> b0, b1 of the even strip and b0, b1 of the odd strip,
// exact, times 2^-45. A code's bits are first placed as a bf16 of 2^-126 times its value (subnormal
// for 0.5).
DEVICE void nvfp4_fragments(u32 word, u32 scale, u32 (&b)[4]) {
    const u32 even = twice_low(scale), odd = twice_high(scale);
    b[0] = mul_bf16x2((word << 6) & 0x81c081c0u, even);
    b[1] = mul_bf16x2(rotate_right(word, 4) & 0x81c081c0u, even);
    b[2] = mul_bf16x2((word << 2) & 0x81c081c0u, odd);
    b[3] = mul_bf16x2((word & 0x81808180u) | ((word >> 8) & 0x00400040u), odd);
}

// Two E4M3 in bytes 1 and 3 -> two bf16, exact: the bits, shifted into place, are a bf16 of 2^-120
// times the value.
DEVICE u32 fp8_pair(u32 spread) {
    return mul_bf16x2((spread & 0x80008000u) | ((spread >> 4) & 0x07f007f0u), 0x7b807b80u);
}
// One word -> b0, b1 of its strip.
DEVICE void fp8_fragments(u32 word, u32 (&b)[2]) {
    b[0] = fp8_pair(select_bytes(word, 0, 0x1404));
    b[1] = fp8_pair(select_bytes(word, 0, 0x3424));
}
