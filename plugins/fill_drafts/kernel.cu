// fill_drafts: one thread per place of the block.
#include "cuda/device.cuh"

// ids, tokens [rows]; best [count]; first [1] or null.
KERNEL void fill_drafts(const i32* ids, const i32* best, i32* tokens, i32* first, int rows,
                        int count, int at) {
    let_next_start();
    wait_for_previous();
    const int t = static_cast<int>(threadIdx.x);
    if (t >= rows) return;
    int token = ids[t];
    if (token < 0 && t >= at && t < at + count) token = max(best[t - at], 0);
    tokens[t] = token;
    if (first && t == at) *first = token;
}
