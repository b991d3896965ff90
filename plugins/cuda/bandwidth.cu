// Measures the device's read bandwidth, against which the kernels' times are compared.
#include "cuda/device.cuh"

constexpr int THREADS = 512;
constexpr int FLIGHT = 8;  // 16-byte loads in flight per thread

// Reads `blocks` blocks of THREADS * FLIGHT * 16 bytes. `sink` is written only if the xor of all
// words is one value out of 2^32, so that the compiler cannot omit a load.
KERNEL void __launch_bounds__(THREADS) read_memory(const uint4* from, u32* sink, int blocks) {
    u32 seen = 0;
    for (int block = blockIdx.x; block < blocks; block += gridDim.x) {
        const uint4* at = from + static_cast<u64>(block) * (THREADS * FLIGHT) + threadIdx.x;
        uint4 x[FLIGHT];
#pragma unroll
        for (int i = 0; i < FLIGHT; i++) x[i] = at[i * THREADS];
#pragma unroll
        for (int i = 0; i < FLIGHT; i++) seen ^= x[i].x ^ x[i].y ^ x[i].z ^ x[i].w;
    }
    if (seen == 0x9e3779b9u) *sink = seen;
}
