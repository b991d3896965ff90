// Sizes of draft_attention's kernel, and the work of a warp on one tile of keys and values.
//
// Compile-time, from launch.py: HEAD_DIM, NORM_F32, ROTARY; THREADS, GROUPS, BLOCK_ROWS, TILE (positions
// of a stage), STAGES, STRETCHES (most stretches of the context).
#pragma once
#include "cuda/device.cuh"

#ifndef HEAD_DIM
#error "HEAD_DIM must be defined"
#endif
#ifndef NORM_F32
#error "NORM_F32 must be defined"
#endif

constexpr int D = HEAD_DIM;
static_assert(D == 16 || D == 32 || D == 64 || D == 128 || D == 256, "head dimension");
constexpr int WARPS = THREADS / 32;
constexpr int ROWS = BLOCK_ROWS;               // query rows of a block
constexpr int PITCH = D + 8;                   // floats; keeps the merge's writes off one bank
constexpr u32 ROW_BYTES = D * 2, STAGE_BYTES = 2 * TILE * ROW_BYTES;
constexpr u32 VALUES = TILE * ROW_BYTES;       // within a stage
constexpr float NOTHING = -1e30f;              // below any score; its differences stay finite

// Offset of a 16-byte chunk of a row, bytes. Chunks are permuted so that the same chunk of eight
// rows lies in different banks.
DEVICE u32 place(int row, int chunk) {
    constexpr int mask = D / 8 < 8 ? D / 8 - 1 : 7;
    return row * ROW_BYTES + ((chunk ^ (row & mask)) << 4);
}

// A warp's running softmax, in base 2, of 16 rows over the positions of its group.
struct State {
    float most[2], sum[2];  // for rows g and g + 8; the sum is this lane's part
    float o[D / 8][4];
};

// Which keys a row sees.
struct View {
    int query;   // position of the lane's row g
    int key;     // position of the group's first key
    int end;     // keys at and past it do not exist
    int least;   // bounds of the distance, query - key, of keys that are seen
    int most;
};

DEVICE bool seen(const View& v, int row, int column) {
    int key = v.key + column, distance = v.query + row - key;
    return key < v.end && distance >= v.least && distance <= v.most;
}

DEVICE void score(float (&s)[2][4], saddr q, saddr keys, int row0, int key0) {
    int lane = threadIdx.x % 32;
    int q_row = row0 + (lane & 15), q_chunk = lane >> 4;
    int k_row = key0 + (lane & 7) + ((lane >> 4) << 3), k_chunk = (lane >> 3) & 1;
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        u32 a[4], b[4];
        load_matrix4(a, q + place(q_row, 2 * k + q_chunk));
        load_matrix4(b, keys + place(k_row, 2 * k + k_chunk));
        mma_bf16(s[0], a, b[0], b[1]);
        mma_bf16(s[1], a, b[2], b[3]);
    }
}

// Masks and scales the scores and turns them into weights; rescales the earlier sums.
DEVICE void weigh(State& state, float (&s)[2][4], const View& view) {
    int column = 2 * (threadIdx.x % 4);
    const float scale = 1.44269504f / sqrtf(static_cast<float>(D));
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float most = NOTHING;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float& x = s[i / 2][2 * half + i % 2];
            bool in = seen(view, 8 * half, 8 * (i / 2) + column + i % 2);
            x = in ? x * scale : NOTHING;
            most = fmaxf(most, x);
        }
        most = fmaxf(most, shuffle_xor(most, 1));
        most = fmaxf(most, shuffle_xor(most, 2));
        most = fmaxf(most, state.most[half]);
        float shrink = exp2f(state.most[half] - most);
        state.most[half] = most;
        state.sum[half] *= shrink;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float& x = s[i / 2][2 * half + i % 2];
            // If nothing has been seen yet, `most` is NOTHING too and the difference would be 0.
            x = x == NOTHING ? 0.0f : exp2f(x - most);
            state.sum[half] += x;
        }
#pragma unroll
        for (int d = 0; d < D / 8; d++) {
            state.o[d][2 * half] *= shrink;
            state.o[d][2 * half + 1] *= shrink;
        }
    }
}

// A value that depends, through the weighted values, on every load of a tile; for `received`.
DEVICE u32 last_of(const State& state) {
    u32 x = 0;
#pragma unroll
    for (int d = 0; d < D / 8; d += 2) x ^= float_bits(state.o[d][0]);
    return x;
}

DEVICE void attend(State& state, saddr q, saddr stage, int row0, int key0, const View& view) {
    float s[2][4] = {};
    score(s, q, stage, row0, key0);
    weigh(state, s, view);
    u32 a[4] = {pack_bf16x2(s[0][0], s[0][1]), pack_bf16x2(s[0][2], s[0][3]),
                pack_bf16x2(s[1][0], s[1][1]), pack_bf16x2(s[1][2], s[1][3])};
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int d = 0; d < D / 16; d++) {
        u32 b[4];
        load_matrix4_transposed(b, stage + VALUES + place(key0 + (lane & 15), 2 * d + (lane >> 4)));
        mma_bf16(state.o[2 * d], a, b[0], b[1]);
        mma_bf16(state.o[2 * d + 1], a, b[2], b[3]);
    }
}
