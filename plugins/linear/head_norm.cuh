// Rows that come without the factor 1 / rms of each head of 128 columns, which is a step of K.
// Stages are single steps here. From one to the next, a warp's sums are multiplied by the quotient
// of the two heads' factors, and at the end by the last head's factor: so it needs no second set of
// sums.
//
// Compile-time: HEAD_SCALE, whether rows come like this; see also pipeline.cuh.
#pragma once
#include "linear/mma.cuh"

constexpr float LARGEST = 3.4e38f;
static_assert(HEAD_COLUMNS == STEP_K && slots_of(NVFP4) == 1, "two slots are one head");
static_assert(!HEAD_SCALE || ONLY_NVFP4 && !NARROW, "only Mainloop::nvfp4 scales by head");

// Computes 1 / rms [head][ROWS] of `count` heads from sums of squares, activation_slabs.cuh. Called by one
// warp.
DEVICE void head_factors(float* factors, const float* squares, int count, float eps) {
#pragma unroll 3
    for (int i = threadIdx.x % 32; i < count * ROWS; i += 32) {
        const int row = i / ROWS * HEAD_ROWS + i % ROWS;
        const float4* const from = reinterpret_cast<const float4*>(squares + row * HEAD_PIECES);
        const float4 a = load_shared_result(from), b = load_shared_result(from + 1);
        const float sum = ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w));
        const float square = fma_rn(sum, 1.0f / HEAD_COLUMNS, eps);
        factors[i] = rsqrtf(fminf(square, LARGEST));  // not 0, by which `pass` divides
    }
}

// A warp's view of these factors: for a lane's rows 16 m + 8 i + lane / 4, those of the current
// head.
struct Heads {
    saddr at;    // of the lane's first row and the current head
    saddr made;  // barrier: the factors are there
    bool known;  // whether `now` has been loaded
    float now[ROW_TILES][2];

    DEVICE Heads(saddr factors, saddr made_)
        : at(factors + threadIdx.x % 32 / 4 * 4), made(made_), known(false) {}
    DEVICE void load(float (&to)[ROW_TILES][2]) const {
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++) {
#pragma unroll
            for (int i = 0; i < 2; i++) to[m][i] = bits_float(load_shared4(at + 64 * m + 32 * i));
        }
    }
    DEVICE void need() {
        if (known) return;
        barrier_wait(made, 0);
        load(now);
        known = true;
    }
    // Goes to the next stage's head.
    DEVICE void pass(Sums& sums) {
        need();
        at += ROWS * 4;
        float next[ROW_TILES][2];
        load(next);
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float by = __fdividef(now[m][i], next[m][i]);
                scale(sums, m, i, by);
                now[m][i] = next[m][i];
            }
        }
    }
    DEVICE void end(Sums& sums) {
        need();
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++) {
#pragma unroll
            for (int i = 0; i < 2; i++) scale(sums, m, i, now[m][i]);
        }
    }
    DEVICE static void scale(Sums& sums, int m, int i, float by) {
#pragma unroll
        for (int j = 0; j < STRIPS; j++) sums[m][j][2 * i] *= by, sums[m][j][2 * i + 1] *= by;
    }
};
