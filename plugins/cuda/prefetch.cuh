// Prefetching the next products' weights into the L2 cache: done by launches that leave memory
// idle, and by products whose own weight is already there.
#pragma once
#include "cuda/device.cuh"

// Called by one thread of each block: prefetches the block's `share` bytes (a multiple of 16), if
// there is a weight.
DEVICE void fetch_ahead(const u8* weight, int block, u32 share) {
    if (weight && share) prefetch_bulk(weight + static_cast<i64>(block) * share, share);
}

// What the next product reads first: pieces of its packed weight, offset and size in units of 512
// bytes.
struct Following {
    const u8* packed;
    const int2* pieces;
    int count;

    // Called by one warp of every block.
    DEVICE void fetch() const {
        if (!packed) return;
#pragma unroll 1
        for (int i = blockIdx.x + threadIdx.x % 32 * gridDim.x; i < count; i += 32 * gridDim.x) {
            const int2 piece = pieces[i];
            prefetch_bulk(packed + static_cast<i64>(piece.x) * 512, piece.y * 512);
        }
    }
};
