// Kernels for tests/plugins/test_noise.py: the functions of cuda/noise.cuh, one element each thread.
#include "cuda/noise.cuh"

KERNEL void philox_words(const uint4* counters, const u32* keys, uint4* out) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = philox(counters[i], {keys[2 * i], keys[2 * i + 1]});
}

KERNEL void functions(const u32* words, const float* z, float* out) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    out[4 * i] = exponential(words[i]);
    out[4 * i + 1] = gumbel(words[i]);
    out[4 * i + 2] = exp_rn(z[i]);
    out[4 * i + 3] = log_rn(exponential(words[i]));
}

KERNEL void words_of_ids(const u32* seed, const i32* positions, const i32* ids, u32* out) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const uint4 four = noise_words({seed[0], seed[1]}, positions[i], ids[i] / 4);
    const u32 lanes[4] = {four.x, four.y, four.z, four.w};
    out[i] = lanes[ids[i] % 4];
}
