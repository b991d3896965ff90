// Embedding rows, and the input of the first product of a block of rows.
//
// Compile-time: NEXT, what is written for that product: 0 nothing; 1 or 2 the rows in slabs, times
// (offset + weight) of its norm, whose weight is bf16 or float32, and the sums of squares from
// which its row scales are computed.
#include "linear/vec8.cuh"
#include "linear/activation_slabs.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int SLICE = 256;  // columns that a warp copies
constexpr int MOST_ROWS = 32, SQUARES_COLUMNS = 32;  // of the sums of squares
constexpr u32 NAN_PAIR = 0x7fff7fffu;

// Row t is table[ids[t]], or table[filler] from `count` on. An id outside the table gives a row of
// NaN, which accept reports. A warp copies one slice of one row. Past the last of `total` rows,
// only sums of squares are written, as zeros.
KERNEL void __launch_bounds__(THREADS)
embed(const u16* table, const i32* ids, u16* rows, u16* slabs, float* squares,
      const void* __restrict__ norm_weight, int vocabulary, int hidden, int total, int count,
      int filler, float offset) {
    const int t = blockIdx.x, lane = threadIdx.x % 32;
    const int column = (blockIdx.y * WARPS + threadIdx.x / 32) * SLICE + lane * 8;
    const bool inside = column < hidden, there = inside && t < total;
    float w[8];
    if (NEXT && inside) norm_weights8<NEXT == 2>(w, norm_weight, column, offset);
    let_next_start();
    wait_for_previous();
    uint4 x = make_uint4(0, 0, 0, 0);
    if (there) {
        const int id = t < count ? ids[t] : filler;
        x = make_uint4(NAN_PAIR, NAN_PAIR, NAN_PAIR, NAN_PAIR);
        if (id >= 0 && id < vocabulary)
            x = *reinterpret_cast<const uint4*>(table + static_cast<u64>(id) * hidden + column);
        *reinterpret_cast<uint4*>(rows + static_cast<u64>(t) * hidden + column) = x;
    }
    if (!NEXT) return;
    float sum = squares8(x);
    sum += shuffle_xor(sum, 1);
    sum += shuffle_xor(sum, 2);
    if (inside && lane % 4 == 0) squares[column / SQUARES_COLUMNS * MOST_ROWS + t] = sum;
    if (!there) return;
    float v[8];
    unpack8(v, x);
    *reinterpret_cast<uint4*>(slabs + slab_offset(total, t, column)) =
        make_uint4(pack_bf16x2(v[0] * w[0], v[1] * w[1]), pack_bf16x2(v[2] * w[2], v[3] * w[3]),
                   pack_bf16x2(v[4] * w[4], v[5] * w[5]), pack_bf16x2(v[6] * w[6], v[7] * w[7]));
}
