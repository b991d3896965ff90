// The rows of a verify after the recurrence, if the next product's kernel is to read them. This
// product begins with a norm over each head and a gate; 1 / rms of a head is not known here,
// since other blocks compute the head's other columns. So the makers apply the norm's weight and
// the gate, and leave sums of squares, from which the product's kernel computes the missing
// factor.
//
// Compile-time: NEXT, 0 nothing is left; 1 or 2 the norm's weight is bf16 or float32.
#pragma once
#include "gdn/recurrence.cuh"
#include "linear/activation_slabs.cuh"

static_assert(D == HEAD_COLUMNS && SLABS == HEAD_PIECES && MOST_ROWS <= HEAD_ROWS,
              "a block leaves one sum of squares for a row and head");

// What the next product begins with, and where its rows go.
struct Next {
    const u16* gate;     // [rows, WIDTH]
    const void* weight;  // [D]
    u16* slabs;          // of the product's rows: 64 columns each
    float* squares;      // [VALUE_HEADS][HEAD_ROWS][HEAD_PIECES]
    float offset;
};

// A maker's part after all rows have been made. When the walkers have run MAKERS rows, half of
// the makers finish them, by turns: a maker two rows at a time, a half of its lanes each. A lane
// has four columns. Gates are loaded, and what columns are multiplied by is computed, before
// that.
struct Finish {
    static constexpr int STEP = 2 * MAKERS;  // rows from one turn of a maker to its next
    static_assert(MAKERS == 4, "two makers finish the rows of a turn");
    static_assert(COLUMNS / 4 <= 16, "half of the lanes have all columns");
    float w[4];
    int four, column;  // number of the lane's group of four columns; the first of them in o
    bool there;        // whether the lane has columns
    int first, t;      // the maker's first row of its turn, and the lane's
    uint2 gate;        // of row t

    DEVICE Finish(const Place& p, const Next& next) {
        four = p.lane % 16;
        there = four < COLUMNS / 4;
        column = p.value_four(there ? four : 0);
#pragma unroll
        for (int i = 0; i < 4; i++)
            w[i] = next.offset + plain(next.weight, column % D + i, NEXT == 2);
        first = (p.warp - WALKERS) * 2;
        t = first + p.lane / 16;
    }
    DEVICE void load_gate(const Next& next, int row) {
        gate = *reinterpret_cast<const uint2*>(next.gate + row * WIDTH + column);
    }
    // Called when the gates may be read.
    DEVICE void start(const Next& next, int rows) {
        gate = make_uint2(0, 0);
        if (t < rows) load_gate(next, t);
    }
    DEVICE float4 factors() const {
        return make_float4(w[0] * silu(bf16x2_low(gate.x)), w[1] * silu(bf16x2_high(gate.x)),
                           w[2] * silu(bf16x2_low(gate.y)), w[3] * silu(bf16x2_high(gate.y)));
    }
    // Stores o of row t, the row for the product, and the sums of squares over the block's columns.
    DEVICE void row(const Rows& m, const Place& p, const Next& next, u16* o, int rows,
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
            next.squares[(column / D * HEAD_ROWS + t) * HEAD_PIECES + p.slab] = sum;
    }
    DEVICE void run(const Rows& m, const Place& p, const Barriers& barriers, const Next& next,
                    u16* o, int rows) {
#pragma unroll 1
        for (; first < rows; first += STEP, t += STEP) {
            const float4 by = factors();
            if (t + STEP < rows) load_gate(next, t + STEP);
            Barriers::wait(barriers.walked(first));
            row(m, p, next, o, rows, by);
        }
    }
};
