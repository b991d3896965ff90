// A warp's running result over tiles, and how it is stored: as a piece's result for `combine`, or
// as the output.
#pragma once

#include "verify_attention/kv_tile.cuh"

// A warp's state from tile to tile: mixture `o` (weights times values), base and sum of weights of
// each row. The sums stay split over lanes and quarters.
struct Running {
    float o[MT][NO][4];
    float base[MT][2];
    float sum[MT][2];
};

// Number, among all query rows, of this lane's row in half h of m16 tile i.
DEVICE int row_of(int i, int h, const Lane& at) {
    return (at.heads * MT + i) * TOKENS + 8 * h + at.g;
}

template <bool F16> DEVICE u32 pack(float x, float y) {
    return F16 ? pack_f16x2(x, y) : pack_bf16x2(x, y);
}

// The first column of the pair at a given place in a piece's row. Places are ordered [quarter: 4]
// [c / 2: 2][t: 4][c % 2: 2][pair: 2], so that a lane stores 16 bytes at once.
DEVICE int piece_column(int place) {
    const int c = place / 16 % 2 * 2 + place / 2 % 2, t = place / 4 % 4, second = place % 2;
    return place / 32 * (WIDTH / 4) + 16 * c + (FP8 ? 4 * t + 2 * second : 2 * t + 8 * second);
}

// This lane's values in the 16 columns number c of a row, times `by`: two pairs, as in
// piece_column.
template <bool F16> DEVICE uint2 pairs(const Running& r, int i, int h, int c, float by) {
    const float x0 = r.o[i][2 * c][2 * h] * by, x1 = r.o[i][2 * c][2 * h + 1] * by;
    const float y0 = r.o[i][2 * c + 1][2 * h] * by, y1 = r.o[i][2 * c + 1][2 * h + 1] * by;
    return FP8 ? make_uint2(pack<F16>(x0, y0), pack<F16>(x1, y1))
               : make_uint2(pack<F16>(x0, x1), pack<F16>(y0, y1));
}

// Stores a piece's mixture divided by its sum, and base and sum of each row, for `combine`.
struct Piece {
    u16* to;  // [ROWS, WIDTH]
    float2* stats;
    int tokens;

    DEVICE void store(const Running& r, const Lane& at) const {
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                if (8 * h + at.g >= tokens) continue;
                const int row = row_of(i, h, at);
                const float sum = r.sum[i][h], by = sum > 0.0f ? reciprocal_approx(sum) : sum;
                if (at.quarter == 0 && at.t == 0) stats[row] = make_float2(r.base[i][h], sum);
                uint4* place = reinterpret_cast<uint4*>(to + row * WIDTH) + at.quarter * 8 + at.t;
#pragma unroll
                for (int c = 0; c < NO / 2; c += 2) {
                    const uint2 a = pairs<FP8 != 0>(r, i, h, c, by);
                    const uint2 b = pairs<FP8 != 0>(r, i, h, c + 1, by);
                    place[2 * c] = make_uint4(a.x, a.y, b.x, b.y);
                }
            }
    }
};

// Stores a mixture times scale / sum as the output; the heads of a group are contiguous.
struct Output {
    u16* to;  // address of the first token and head
    i64 token_stride;
    float scale;
    int tokens;

    DEVICE void store(const Running& r, const Lane& at) const {
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int token = 8 * h + at.g;
                if (token >= tokens) continue;
                const float sum = r.sum[i][h];
                const float by = sum > 0.0f ? mul_rn(scale, reciprocal_approx(sum)) : sum;
                u16* row = to + token * token_stride + (at.heads * MT + i) * WIDTH +
                           at.quarter * (WIDTH / 4);
#pragma unroll
                for (int c = 0; c < NO / 2; c++) {
                    const uint2 both = pairs<false>(r, i, h, c, by);
                    if (FP8) {
                        *reinterpret_cast<uint2*>(row + 16 * c + 4 * at.t) = both;
                    } else {
                        *reinterpret_cast<u32*>(row + 16 * c + 2 * at.t) = both.x;
                        *reinterpret_cast<u32*>(row + 16 * c + 8 + 2 * at.t) = both.y;
                    }
                }
            }
    }
};
