// The standard nodes of the graphs: embedding rows, rows side by side, the drafter's tokens.
#include "cuda/device.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int SLICE = 256;  // columns that a warp moves
constexpr u32 NAN_PAIR = 0x7fff7fffu;

// Row t is table[ids[t]], or table[filler] from `count` on. An id outside the table has no row:
// NaN, which accept reports. A warp copies one slice of one row.
KERNEL void __launch_bounds__(THREADS)
embed(const u16* table, const i32* ids, u16* rows, int vocabulary, int hidden, int count,
      int filler) {
    wait_for_previous();
    let_next_start();
    int t = blockIdx.x, slice = blockIdx.y * WARPS + threadIdx.x / 32;
    int column = slice * SLICE + threadIdx.x % 32 * 8;
    if (column >= hidden) return;
    int id = t < count ? ids[t] : filler;
    uint4 x = make_uint4(NAN_PAIR, NAN_PAIR, NAN_PAIR, NAN_PAIR);
    if (id >= 0 && id < vocabulary)
        x = *reinterpret_cast<const uint4*>(table + static_cast<u64>(id) * hidden + column);
    *reinterpret_cast<uint4*>(rows + static_cast<u64>(t) * hidden + column) = x;
}

// y[t] = [source 0's row t, source 1's row t, ...], in units of 16 bytes. x rows, y sources.
KERNEL void __launch_bounds__(THREADS)
concat(const u64* sources, const i32* widths, const i32* starts, uint4* y, int width) {
    int t = blockIdx.x, source = blockIdx.y, units = widths[source];
    u64 row = static_cast<u64>(t);
    const uint4* from = reinterpret_cast<const uint4*>(sources[source]) + row * units;
    uint4* to = y + row * width + starts[source];
    wait_for_previous();
    let_next_start();
    for (int i = threadIdx.x; i < units; i += THREADS) to[i] = from[i];
}

// tokens[0] = last; then the forced id where there is one, else the best of the draft's next row.
KERNEL void compose(const i32* last, const i32* forced, const i32* best, i32* tokens, int rows) {
    wait_for_previous();
    let_next_start();
    int i = static_cast<int>(threadIdx.x);
    if (i >= rows) return;
    int token = *last;
    if (i > 0) {
        int wanted = forced[i - 1];
        token = wanted >= 0 ? wanted : best[i];
    }
    tokens[i] = token;
}
