// Standard nodes of the graphs: concatenation of rows, composing the drafter's tokens.
#include "cuda/device.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS;

// y[t] = [source 0's row t, source 1's row t, ...], in units of 16 bytes. Grid: rows, sources.
KERNEL void __launch_bounds__(THREADS)
concat(const u64* sources, const i32* widths, const i32* starts, uint4* y, int width) {
    int t = blockIdx.x, source = blockIdx.y, units = widths[source];
    u64 row = static_cast<u64>(t);
    const uint4* from = reinterpret_cast<const uint4*>(sources[source]) + row * units;
    uint4* to = y + row * width + starts[source];
    let_next_start();
    wait_for_previous();
    for (int i = threadIdx.x; i < units; i += THREADS) to[i] = from[i];
}

// tokens[0] = last; then the forced id if there is one, else the best id of the draft's next row.
// If that is -1 (the row has a NaN), 0 is used: any id will do since the target decides, but -1
// would give the target a row of NaN.
KERNEL void compose(const i32* last, const i32* forced, const i32* best, i32* tokens, int rows) {
    let_next_start();
    wait_for_previous();
    int i = static_cast<int>(threadIdx.x);
    if (i >= rows) return;
    int token = *last;
    if (i > 0) {
        int wanted = forced[i - 1];
        token = wanted >= 0 ? wanted : max(best[i], 0);
    }
    tokens[i] = token;
}
