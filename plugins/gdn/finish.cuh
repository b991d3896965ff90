// The rows of a verify after the recurrence, if the next product's kernel is to read them. This
// product begins with a norm over each head and a gate; 1 / rms of a head is not known here, since
// other blocks compute the head's other columns. So the makers apply the norm's weight and the gate,
// and leave sums of squares, from which the product's kernel computes the missing factor.
//
// Compile-time: NEXT, 0 nothing is left; 1 or 2 the norm's weight is bf16 or float32.
#pragma once
#include "gdn/block.cuh"
#include "linear/slabs.cuh"

constexpr int LEFT_ROWS = 32;  // for which sums of squares have a place; as in linear/heads.cuh

// What the next product begins with, and where its rows go.
struct Next {
    const u16* gate;      // [rows, WIDTH]
    const void* weight;   // [D]
    u16* slabs;
    float* squares;       // [VALUE_HEADS][LEFT_ROWS][SLABS]
    float offset;
};

// A maker finishes two rows at a time, a half of its lanes each; a lane has four columns.
struct Finish {
    float w[4];
    int half, four;  // which of the rows; number of the lane's group of four columns
    int column;      // of o
    bool there;      // whether the lane has columns
    static_assert(COLUMNS / 4 <= 16, "half of the lanes have all columns");

    DEVICE Finish(const Place& p, const Next& next) {
        half = p.lane / 16, four = p.lane % 16;
        there = four < COLUMNS / 4;
        column = p.value_four(there ? four : 0);
#pragma unroll
        for (int i = 0; i < 4; i++)
            w[i] = next.offset + plain(next.weight, column % D + i, NEXT == 2);
    }
    DEVICE uint2 load_gate(const Next& next, int t) const {
        return *reinterpret_cast<const uint2*>(next.gate + t * WIDTH + column);
    }
    // What the columns are multiplied by.
    DEVICE float4 factors(uint2 gate) const {
        return make_float4(w[0] * silu(bf16x2_low(gate.x)), w[1] * silu(bf16x2_high(gate.x)),
                           w[2] * silu(bf16x2_low(gate.y)), w[3] * silu(bf16x2_high(gate.y)));
    }
    // Stores o of row t, the row for the product, and the sums of squares over the block's columns.
    DEVICE void row(const Rows& m, const Place& p, const Next& next, u16* o, int rows, int t,
                    float4 by) const {
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (there && t < rows) x = reinterpret_cast<const float4*>(m.row(t) + Rows::V)[four];
        const uint2 bits = make_uint2(pack_bf16x2(x.x, x.y), pack_bf16x2(x.z, x.w));
        x = make_float4(bf16x2_low(bits.x), bf16x2_high(bits.x), bf16x2_low(bits.y),
                        bf16x2_high(bits.y));
        float sum = dot4(x, x);
        sum = add_rn(sum, shuffle_xor(sum, 1));
        sum = add_rn(sum, shuffle_xor(sum, 2));
        if (!there || t >= rows) return;
        *reinterpret_cast<uint2*>(o + t * WIDTH + column) = bits;
        *reinterpret_cast<uint2*>(next.slabs + slab_offset(rows, t, column) + column % 8) =
            make_uint2(pack_bf16x2(x.x * by.x, x.y * by.y), pack_bf16x2(x.z * by.z, x.w * by.w));
        if (four % (SLAB / 4) == 0)
            next.squares[(column / D * LEFT_ROWS + t) * SLABS + p.slab] = sum;
    }
};

// The makers' part after the rows have been made: when the walkers have run a turn of MAKERS rows,
// half of the makers finish it, in turn. Gates are loaded and their factors computed before that.
struct Finishing {
    static constexpr int STEP = 2 * MAKERS;  // rows from one turn of a maker to its next
    static_assert(MAKERS == 4, "two makers finish the rows of a turn");
    int t;  // of the lane
    uint2 gate;

    DEVICE void start(const Finish& f, const Place& p, const Next& next, int rows) {
        const int maker = p.warp - WALKERS;
        t = maker * 2 + f.half;
        gate = make_uint2(0, 0);
        if (t < rows) gate = f.load_gate(next, t);
    }
    DEVICE void run(const Finish& f, const Rows& m, const Place& p, const Barriers& barriers,
                    const Next& next, u16* o, int rows) {
        const int first = (p.warp - WALKERS) * 2;
#pragma unroll 1
        for (int i = first; i < rows; i += STEP, t += STEP) {
            const float4 by = f.factors(gate);
            if (t + STEP < rows) gate = f.load_gate(next, t + STEP);
            Barriers::wait(barriers.walked(i));
            f.row(m, p, next, o, rows, t, by);
        }
    }
};
