// The values for which the lanes of a warp of the product with many rows wait when they release a
// stage of given content.
//
// Compile-time: those of prefill.cu, of which KINDS is NVFP4 alone.
#include "cuda/device.cuh"

// The first words of shared memory become the values of the lanes.
DEVICE void tell(saddr, u32 x) {
    DYNAMIC_SHARED(memory);
    reinterpret_cast<u32*>(memory)[threadIdx.x] = x;
}

#define barrier_arrive_received tell
#include "linear/prefill.cu"

constexpr int FIRST = 128, BARRIER = FIRST + STAGE_BYTES;

KERNEL void released(const u32* stage, u32* seen) {
    DYNAMIC_SHARED(memory);
    const saddr at = shared_address(memory);
    u32* const words = reinterpret_cast<u32*>(memory + FIRST);
    for (int i = threadIdx.x; i < STAGE_BYTES / 4; i += 32) words[i] = stage[i];
    if (threadIdx.x == 0) barrier_init(at + BARRIER, 1), barrier_init_done();
    sync_block();
    if (threadIdx.x == 0) barrier_arrive(at + BARRIER);
    const Params params = {};
    const PipelineState state = {at + FIRST, at + BARRIER, 0, 0, 0};
    Consumer consumer = {params, state, {}, 1, ROWS_BYTES, 0, SCALE_EXPONENT};
    Sums<TILE_ROWS / 16> sums = {};
    multiply<NVFP4>(sums, 1, consumer);
    seen[threadIdx.x] = reinterpret_cast<u32*>(memory)[threadIdx.x];
}
