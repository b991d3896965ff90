// One warp processes one head's row of 256: RMSNorm, rotation, rounding. Lane l holds columns 2l
// and 2l + 1 of each 64, so that a narrow rotation involves few elements of few lanes.
#pragma once

#include "cuda/device.cuh"

constexpr int WIDTH = 256;
constexpr int CACHE_BYTES = FP8 ? WIDTH : 2 * WIDTH;  // of one row in the cache
constexpr int WORDS = WIDTH / 64;  // words of two columns that a lane holds

// HALF, the number of a row's angles, is a power of two, so that it divides the number of threads.
static_assert(HALF >= 8 && HALF <= WIDTH / 2 && (HALF & (HALF - 1)) == 0, "angles of a row");

// The angle is the same float32 product as in the reference. |error| < 2^-22 up to 2^18 radians:
// multiples of pi/2 are subtracted in two steps, exact except for the remainder's last bit.
DEVICE void cosine_sine(float angle, float& cosine, float& sine) {
    const int quarters = static_cast<int>(fma_rn(angle, 0.636619747f, 0.5f));
    const float turns = -static_cast<float>(quarters);
    float x = fma_rn(turns, 1.57079637f, angle);
    x = fma_rn(turns, -4.37113883e-8f, x);
    const float xx = mul_rn(x, x);
    float s = fma_rn(xx, -1.9515295891e-4f, 8.3321608736e-3f);
    s = fma_rn(xx, s, -1.6666654611e-1f);
    s = fma_rn(mul_rn(xx, x), s, x);
    float c = fma_rn(xx, 2.443315711809948e-5f, -1.388731625493765e-3f);
    c = fma_rn(xx, c, 4.166664568298827e-2f);
    c = fma_rn(mul_rn(xx, xx), c, fma_rn(xx, -0.5f, 1.0f));
    const bool swap = (quarters & 1) != 0;
    const float a = swap ? s : c, b = swap ? c : s;
    cosine = ((quarters + 1) & 2) != 0 ? -a : a;
    sine = (quarters & 2) != 0 ? -b : b;
}

// The frequency of this thread's angles.
DEVICE float own_frequency(const float* frequency) {
    return frequency[threadIdx.x & (HALF - 1)];
}

// The frequency of this thread's angles, and the positions of the call's rows.
struct Turns {
    float own;
#if MROPE
    const i32* at;  // [rows, 3]
    int rows;

    DEVICE int position(int row) const {
        const int j = threadIdx.x & (HALF - 1);
        const int stream = j % 3 == 1 && j < 3 * MROPE_HEIGHT  ? 1
                           : j % 3 == 2 && j < 3 * MROPE_WIDTH ? 2
                                                               : 0;
        return row < rows ? at[row * 3 + stream] : 0;
    }
#else
    int first;

    DEVICE int position(int row) const { return first + row; }
#endif
};

// Writes cosine [HALF] and sine [HALF] for each of the call's rows from .. from + count - 1, row
// after row. Called by the whole block.
DEVICE void angles(float* table, const Turns& turns, int from, int count) {
    const int j = threadIdx.x & (HALF - 1);
    for (int row = threadIdx.x / HALF; row < count; row += blockDim.x / HALF) {
        float* at = table + row * 2 * HALF + j;
        const float position = static_cast<float>(turns.position(from + row));
        cosine_sine(mul_rn(position, turns.own), at[0], at[HALF]);
    }
}

// This lane's part of a row of 16-bit elements.
struct Words {
    u32 at[WORDS];
};
DEVICE Words words(const void* row, int lane) {
    Words x;
#pragma unroll
    for (int j = 0; j < WORDS; j++) x.at[j] = static_cast<const u32*>(row)[32 * j + lane];
    return x;
}
DEVICE void eight(float (&x)[8], const Words& bits) {
#pragma unroll
    for (int j = 0; j < WORDS; j++) {
        x[2 * j] = bf16x2_low(bits.at[j]);
        x[2 * j + 1] = bf16x2_high(bits.at[j]);
    }
}

// offset + weight for this lane's columns.
DEVICE void norm_weights(float (&w)[8], const void* weight, float offset, int lane) {
    if (NORM_F32) {
#pragma unroll
        for (int i = 0; i < 8; i++)
            w[i] = static_cast<const float*>(weight)[64 * (i / 2) + 2 * lane + i % 2];
    } else {
        eight(w, words(weight, lane));
    }
#pragma unroll
    for (int i = 0; i < 8; i++) w[i] = add_rn(w[i], offset);
}

// Cosines and sines for this lane's rotated columns. If WITHIN, both columns of a rotated pair are
// the lane's own, one in each half of the rotated columns; else lanes exchange them.
constexpr bool WITHIN = HALF >= 64;
constexpr int TURNED = WITHIN ? HALF / 32 : 2;  // angles of a lane
struct Rotation {
    float c[TURNED], s[TURNED];
};

// Loads them from a row of the table. Up to 64 rotated columns are in the first words of HALF
// lanes.
DEVICE Rotation turning(const float* at, int lane) {
    const bool first = (lane & HALF / 2) == 0;
    Rotation to;
#pragma unroll
    for (int i = 0; i < TURNED; i++) {
        const int angle = WITHIN ? 64 * (i / 2) + 2 * lane + i % 2 : (2 * lane & (HALF - 1)) + i;
        to.c[i] = at[angle];
        to.s[i] = first ? -at[HALF + angle] : at[HALF + angle];
    }
    return to;
}

// Rotates a row by its angles.
DEVICE void rotate(float (&x)[8], const Rotation& by, int lane) {
#pragma unroll
    for (int i = 0; i < TURNED; i++) {
        if (WITHIN) {
            const float low = x[i], high = x[(i + TURNED) % 8];
            x[i] = fma_rn(low, by.c[i], mul_rn(high, by.s[i]));
            x[(i + TURNED) % 8] = fma_rn(high, by.c[i], mul_rn(low, -by.s[i]));
        } else {
            const float other = shuffle_xor(x[i], HALF / 2);
            if (lane < HALF) x[i] = fma_rn(x[i], by.c[i], mul_rn(other, by.s[i]));
        }
    }
}

// Normalises N rows, interleaved because each is a chain of dependent shuffles. All operations have
// explicit rounding, so that two places that prepare the same row get the same bits.
template <int N> DEVICE void norm(float (&x)[N][8], const float (&w)[8], float eps) {
    float sum[N];
#pragma unroll
    for (int n = 0; n < N; n++) {
        sum[n] = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) sum[n] = fma_rn(x[n][i], x[n][i], sum[n]);
    }
#pragma unroll
    for (int mask = 16; mask >= 1; mask >>= 1)
#pragma unroll
        for (int n = 0; n < N; n++) sum[n] = add_rn(sum[n], shuffle_xor(sum[n], mask));
#pragma unroll
    for (int n = 0; n < N; n++) {
        const float square = fma_rn(sum[n], 1.0f / WIDTH, eps);
        float inverse = rsqrtf(square);  // refined by one Newton step, for the last bits
        inverse = mul_rn(inverse, fma_rn(mul_rn(-0.5f * square, inverse), inverse, 1.5f));
#pragma unroll
        for (int i = 0; i < 8; i++) x[n][i] = mul_rn(mul_rn(x[n][i], inverse), w[i]);
    }
}

// x / by.x, nearly always correctly rounded; by.y is 1 / by.x. Infinity stays infinity.
DEVICE float divide(float x, const float2& by) {
    const float near = mul_rn(x, by.y);
    const float y = fma_rn(fma_rn(-near, by.x, x), by.y, near);
    return isnan(y) ? near : y;
}

// Rounds x / scale to the cache's type and stores it in this lane's columns of the row.
DEVICE void store_cache(u8* row, const float (&x)[8], const float2& scale, int lane) {
#pragma unroll
    for (int j = 0; j < WORDS; j++) {
        const float low = divide(x[2 * j], scale), high = divide(x[2 * j + 1], scale);
        if (FP8) reinterpret_cast<u16*>(row)[32 * j + lane] = pack_e4m3x2(low, high);
        else reinterpret_cast<u32*>(row)[32 * j + lane] = pack_bf16x2(low, high);
    }
}

// The key and value rows of a call, and the parameters for converting them to the cache's form.
struct Fresh {
    const u16* k;
    const u16* v;
    int rows, heads, head;
    float eps;
    float2 scale_k, scale_v;  // x: scale, y: its inverse
};

// Two tokens of a warp: rows t and t + 8 before the norm; zeros past the last row.
constexpr int PAIR = 2;
struct Pair {
    Words k[PAIR], v[PAIR];
};

DEVICE void load_pair(Pair& to, const Fresh& x, int t, int lane) {
#pragma unroll
    for (int n = 0; n < PAIR; n++) {
        const i64 row = static_cast<i64>(t + 8 * n) * x.heads + x.head;
        to.k[n] = to.v[n] = {};
        if (t + 8 * n < x.rows) {
            to.k[n] = words(x.k + row * WIDTH, lane);
            to.v[n] = words(x.v + row * WIDTH, lane);
        }
    }
}

// Stores these rows in the cache's form, at k and v plus token * CACHE_BYTES. Token t is rotated by
// row `angle` of the table, token t + 8 by row `angle` + 8.
DEVICE void store_pair(u8* k, u8* v, const Pair& pair, const Fresh& x, const float (&w)[8],
                       const float* table, int t, int angle, int lane) {
    float y[PAIR][8];
#pragma unroll
    for (int n = 0; n < PAIR; n++) eight(y[n], pair.k[n]);
    norm(y, w, x.eps);
#pragma unroll
    for (int n = 0; n < PAIR; n++) {
        rotate(y[n], turning(table + (angle + 8 * n) * 2 * HALF, lane), lane);
        if (t + 8 * n >= x.rows) continue;
        const i64 at = static_cast<i64>(t + 8 * n) * CACHE_BYTES;
        store_cache(k + at, y[n], x.scale_k, lane);
        eight(y[n], pair.v[n]);
        store_cache(v + at, y[n], x.scale_v, lane);
    }
}
