// Weights that the next products read, on their way into the L2 cache: by launches that leave memory
// idle, and by those that find their own weight there.
#pragma once
#include "cuda/device.cuh"

// By one thread of a block: its `share` bytes (a multiple of 16), if there is a weight.
DEVICE void fetch_ahead(const u8* weight, int block, u32 share) {
    if (weight && share) prefetch_bulk(weight + static_cast<i64>(block) * share, share);
}

// What the next product reads first: pieces of its packed weight, offset and bytes / 512.
struct Following {
    const u8* packed;
    const int2* pieces;
    int count;

    // By one warp of every block.
    DEVICE void fetch() const {
        if (!packed) return;
#pragma unroll 1
        for (int i = blockIdx.x + threadIdx.x % 32 * gridDim.x; i < count; i += 32 * gridDim.x) {
            const int2 piece = pieces[i];
            prefetch_bulk(packed + static_cast<i64>(piece.x) * 512, piece.y * 512);
        }
    }
};
