// Some blocks of a launch that has too many to run them all: the emulated grid along x is a part,
// from block FIRST on, of a grid of BLOCKS.
//
// Compile-time: FIRST, BLOCKS, and the constants of the source, which tell what the source is.
#include "cuda/device.cuh"

DEVICE Index real_block() { return {blockIdx.x + FIRST, blockIdx.y, blockIdx.z}; }
DEVICE Index real_grid() { return {BLOCKS, gridDim.y, gridDim.z}; }

#define blockIdx real_block()
#define gridDim real_grid()

// An offset that does not fit into an int wraps around. Otherwise g++ may compute it in 64 bits,
// which another compiler need not.
#pragma GCC optimize("wrapv")

#if defined(SLABS)
#include "linear/prologue.cu"
#else
#include "linear/prefill.cu"
#endif
