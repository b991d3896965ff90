// The layout of a product's input rows, for the kernels that write them.
//
// bf16 in slabs of 64 of K: [slab][row][64]. In row r, the u-th group of eight columns is stored at
// position u ^ r % 8, so that load_matrix4 has no bank conflicts.
#pragma once
#include "cuda/device.cuh"

constexpr int SLAB_COLUMNS = 64;
constexpr int SLAB_ROW = 2 * SLAB_COLUMNS;  // bytes

// A norm over each head of the rows: sums of squares are [head][HEAD_ROWS][HEAD_PIECES], each
// over HEAD_COLUMNS / HEAD_PIECES neighbouring columns of a row. As in decode_launch.py.
constexpr int HEAD_COLUMNS = 128;
constexpr int HEAD_PIECES = 8;
constexpr int HEAD_ROWS = 32;

// Offset, in elements, of the 8 columns that contain `column`, in one of `rows` rows. Rows of more
// than 2^31 elements, as long steps of a prefill may have them, need i64.
template <class Offset = int> DEVICE Offset slab_offset(int rows, int row, int column) {
    return (static_cast<Offset>(column / SLAB_COLUMNS) * rows + row) * SLAB_COLUMNS +
           ((column % SLAB_COLUMNS / 8) ^ (row & 7)) * 8;
}
