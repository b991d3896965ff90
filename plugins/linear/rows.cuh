// The rows that enter a product, for whoever makes them: where they lie, and the gate in front.
//
// bf16 in slabs of 64 of K: [slab][row][64], the eights of a row r in the order u ^ r % 8, so that
// load_matrix4 meets no bank twice.
#pragma once
#include "cuda/device.cuh"

constexpr int SLAB_COLUMNS = 64;
constexpr int SLAB_ROW = 2 * SLAB_COLUMNS;  // bytes

// Elements before those of 8 columns from `column` of a row, of `rows`.
DEVICE int slab_offset(int rows, int row, int column) {
    return (column / SLAB_COLUMNS * rows + row) * SLAB_COLUMNS +
           ((column % SLAB_COLUMNS / 8) ^ (row & 7)) * 8;
}

// What a gate multiplies a row by, in float32 before the one rounding; silu is gate * sigmoid(gate).
DEVICE float sigmoid(float gate) { return __fdividef(1.0f, 1.0f + __expf(-gate)); }
