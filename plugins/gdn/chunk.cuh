// gdn for a prefill, in chunks of 32 rows. Let S be the state before the chunk, gamma_t the product
// of the decays up to row t, and L[t][s] the product of those after s up to t (0 for s > t). Then
// the recurrence over the chunk is
//     (I + diag(beta) strict(L o K K^T)) d = diag(beta) (V - diag(gamma) K S)
//     O = diag(gamma) Q S + (L o Q K^T) d
//     S <- gamma_last S + K^T diag(L[last]) d
// prefill_chunks.cu computes the matrices of all chunks in parallel: K, Q, T = (I + ...)^-1 diag(beta) and
// P = L o Q K^T. prefill.cu then walks the chunks in order.
//
// Factors are split into bf16 pairs, high + low, and products leave out low x low: an error of at
// most 2^-16 of a term. Decay ratios are computed as products, never as quotients. A chunk starts
// at a multiple of 32 rows of the call, and rows after t reach row t only multiplied by exact
// zeros, so the bits of row t do not depend on them as long as they are finite: zero times NaN is
// NaN.
#pragma once
#include "gdn/conv_gates.cuh"

constexpr int CHUNK = 32;
constexpr int THREADS = 128, WARPS = 4;
constexpr int RUN = 8;                         // consecutive rows that a thread convolves
constexpr int KEY_PART = CHUNK * D * 2;        // bytes of one of K high, K low, Q high, Q low
constexpr int KEY_BYTES = 4 * KEY_PART;        // of a chunk and key head; sizes as in launch.py
constexpr int MATRIX_PART = CHUNK * CHUNK * 2; // bytes of one of T high, T low, P high, P low
constexpr int GAMMA = 4 * MATRIX_PART, FADE = GAMMA + CHUNK * 4;  // gamma, L[last]: float32
constexpr int MATRIX_BYTES = FADE + CHUNK * 4; // of a chunk and value head

// Offset of a row's 16-byte piece in a [CHUNK][D] or [CHUNK][CHUNK] bf16 matrix, bytes, swizzled so
// that the same piece of eight rows lies in different banks.
DEVICE u32 key_at(int row, int piece) { return row * 256 + ((piece ^ (row & 7)) << 4); }
DEVICE u32 matrix_at(int row, int piece) { return row * 64 + ((piece ^ (row >> 1 & 3)) << 4); }

// x = high + low, up to 2^-17 of x; y likewise. high and low hold pairs.
DEVICE void split(float x, float y, u32& high, u32& low) {
    high = pack_bf16x2(x, y);
    low = pack_bf16x2(x - bf16x2_low(high), y - bf16x2_high(high));
}

// The inputs of RUN rows and of the three rows before them, for two channels.
struct Window {
    u32 x[RUN + TAPS - 1];
};

// Rows from `end` on are taken as zero.
DEVICE void load_window(Window& w, const Inputs& in, int channel, int first, int end) {
#pragma unroll
    for (int i = 0; i < RUN + TAPS - 1; i++) {
        const int row = first + i - (TAPS - 1);
        w.x[i] = row < end ? in.pair(row, channel) : 0;
    }
}

DEVICE void convolve_window(float* to, int pitch, const Taps& taps, const Window& w) {
#pragma unroll
    for (int i = 0; i < RUN; i++)
        *reinterpret_cast<float2*>(to + i * pitch) =
            convolved(taps, w.x[i], w.x[i + 1], w.x[i + 2], w.x[i + 3]);
}

// d += (a_high + a_low)(b_high + b_low), without low x low, for two blocks of eight columns.
DEVICE void multiply(float (&d0)[4], float (&d1)[4], const u32 (&a_high)[4], const u32 (&a_low)[4],
                     const u32 (&b_high)[4], const u32 (&b_low)[4]) {
    mma_bf16(d0, a_high, b_high[0], b_high[1]);
    mma_bf16(d1, a_high, b_high[2], b_high[3]);
    mma_bf16(d0, a_high, b_low[0], b_low[1]);
    mma_bf16(d1, a_high, b_low[2], b_low[3]);
    mma_bf16(d0, a_low, b_high[0], b_high[1]);
    mma_bf16(d1, a_low, b_high[2], b_high[3]);
}

// Loads the 16 x 16 block of `matrix` at (row, piece) as the right operand's two blocks of eight
// columns; column n of the operand is row n of the matrix. `matrix` is the high part; the low part
// lies KEY_PART bytes further.
DEVICE void load_keys(u32 (&high)[4], u32 (&low)[4], saddr matrix, int row, int piece) {
    const int lane = threadIdx.x % 32;
    const saddr at = matrix + key_at(row + lane % 8 + lane / 16 * 8, piece + lane / 8 % 2);
    load_matrix4(high, at);
    load_matrix4(low, at + KEY_PART);
}
