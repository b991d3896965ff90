// gdn for a prefill, in chunks of 32 rows. With S the state before the chunk, gamma_t the product
// of the decays up to row t, L[t][s] of those after s up to t (0 for s > t), the chunk's recurrence
// is linear algebra:
//     (I + diag(beta) strict(L o K K^T)) d = diag(beta) (V - diag(gamma) K S)
//     O = diag(gamma) Q S + (L o Q K^T) d
//     S <- gamma_last S + K^T diag(L[last]) d
// chunks.cu works every chunk's matrices out at once: K, Q, T = (I + ...)^-1 diag(beta) and
// P = L o Q K^T. prefill.cu then walks the chunks.
//
// Products are of bf16 pairs, high + low, low x low left out: 2^-16 of a term at worst. Decay
// ratios are products, never quotients; a chunk starts at a multiple of 32 rows of the call, and
// rows after t reach row t only through exact zeros, so t's bits do not depend on them.
#pragma once
#include "gdn/rows.cuh"

constexpr int CHUNK = 32;
constexpr int THREADS = 128, WARPS = 4;
constexpr int RUN = 8;                         // rows a thread convolves together
constexpr int KEY_PART = CHUNK * D * 2;        // bytes of one of K high, K low, Q high, Q low
constexpr int KEY_BYTES = 4 * KEY_PART;        // of a chunk and key head; sizes as in launch.py
constexpr int MATRIX_PART = CHUNK * CHUNK * 2; // bytes of one of T high, T low, P high, P low
constexpr int GAMMA = 4 * MATRIX_PART, FADE = GAMMA + CHUNK * 4;  // gamma, L[last]: float32
constexpr int MATRIX_BYTES = FADE + CHUNK * 4; // of a chunk and value head

// Bytes into a [CHUNK][D] or [CHUNK][CHUNK] bf16 matrix of a row's 16-byte piece; eight rows of one
// piece lie in different banks.
DEVICE u32 key_at(int row, int piece) { return row * 256 + ((piece ^ (row & 7)) << 4); }
DEVICE u32 matrix_at(int row, int piece) { return row * 64 + ((piece ^ (row >> 1 & 3)) << 4); }

// x = high + low, to 2^-17 of x; pairs.
DEVICE void split(float x, float y, u32& high, u32& low) {
    high = pack_bf16x2(x, y);
    low = pack_bf16x2(x - bf16x2_low(high), y - bf16x2_high(high));
}

// The inputs of RUN rows of two channels and of the three rows before.
struct Window {
    u32 x[RUN + TAPS - 1];
};

// Rows from `end` on count as zero.
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

// d += (a_high + a_low)(b_high + b_low) for two neighbouring blocks of eight columns.
DEVICE void multiply(float (&d0)[4], float (&d1)[4], const u32 (&a_high)[4], const u32 (&a_low)[4],
                     const u32 (&b_high)[4], const u32 (&b_low)[4]) {
    mma_bf16(d0, a_high, b_high[0], b_high[1]);
    mma_bf16(d1, a_high, b_high[2], b_high[3]);
    mma_bf16(d0, a_high, b_low[0], b_low[1]);
    mma_bf16(d1, a_high, b_low[2], b_low[3]);
    mma_bf16(d0, a_low, b_high[0], b_high[1]);
    mma_bf16(d1, a_low, b_high[2], b_high[3]);
}

// A 16 x 16 block of `matrix` (its high part; the low part is KEY_PART after), from a row and a
// piece on, as the right operand's two blocks of eight columns: column n is row n of the matrix.
DEVICE void load_keys(u32 (&high)[4], u32 (&low)[4], saddr matrix, int row, int piece) {
    const int lane = threadIdx.x % 32;
    const saddr at = matrix + key_at(row + lane % 8 + lane / 16 * 8, piece + lane / 8 % 2);
    load_matrix4(high, at);
    load_matrix4(low, at + KEY_PART);
}
