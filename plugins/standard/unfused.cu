// The epilogues of linear as separate kernels, to measure the benefit of fusion: bf16 in, computed
// in float32, rounded once. A thread processes 16 bytes, eight elements.
#include "cuda/device.cuh"

constexpr int THREADS = 256;

DEVICE u32 sums(u32 a, u32 b) {
    return pack_bf16x2(bf16x2_low(a) + bf16x2_low(b), bf16x2_high(a) + bf16x2_high(b));
}

DEVICE float silu(float x) { return x / (1.0f + expf(-x)); }

DEVICE u32 gated(u32 a, u32 b) {
    return pack_bf16x2(silu(bf16x2_low(a)) * bf16x2_low(b), silu(bf16x2_high(a)) * bf16x2_high(b));
}

// y = a + b
KERNEL void __launch_bounds__(THREADS) add(const uint4* a, const uint4* b, uint4* y, int units) {
    let_next_start();
    wait_for_previous();
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= units) return;
    const uint4 p = a[i], q = b[i];
    y[i] = make_uint4(sums(p.x, q.x), sums(p.y, q.y), sums(p.z, q.z), sums(p.w, q.w));
}

// y = silu(a) * b
KERNEL void __launch_bounds__(THREADS)
silu_mul(const uint4* a, const uint4* b, uint4* y, int units) {
    let_next_start();
    wait_for_previous();
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= units) return;
    const uint4 p = a[i], q = b[i];
    y[i] = make_uint4(gated(p.x, q.x), gated(p.y, q.y), gated(p.z, q.z), gated(p.w, q.w));
}
