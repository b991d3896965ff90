// image_embed: copies a text row or an image row. Grid: tokens x slices of the columns. A thread
// copies eight neighbouring columns.
#include "cuda/device.cuh"

constexpr int THREADS = 128;

KERNEL void __launch_bounds__(THREADS)
image_embed(const u16* x, const i32* ids, const u16* image, u16* y, int columns) {
    const int chunks = columns / 8, c = blockIdx.y * THREADS + threadIdx.x;
    let_next_start();
    wait_for_previous();
    if (c >= chunks) return;
    const int t = blockIdx.x, id = ids[t];
    const uint4* const from = reinterpret_cast<const uint4*>(id < 0 ? image : x);
    const i64 row = id < 0 ? -1 - id : t;
    reinterpret_cast<uint4*>(y)[static_cast<i64>(t) * chunks + c] = from[row * chunks + c];
}
