// Small kernels for test_verify_attention_kernel.py: parts of verify_attention by themselves.
#include "verify_attention/split_kv.cuh"
#include "verify_attention/qkv_rows.cuh"

KERNEL void angles_of(const float* in, float* out) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    cosine_sine(in[i], out[2 * i], out[2 * i + 1]);
}

// Of each block of rows (first position, end): number of pieces; then start, stop and slot of each.
KERNEL void cuts(const i32* rows, i32* out) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const Pieces pieces = divided(rows[2 * i], rows[2 * i + 1], 0, 1);
    i32* to = out + i * (1 + 3 * 3 * PIECES);
    *to++ = pieces.count;
    for (int item = 0; item < pieces.count; item++) {
        const Span span = pieces.span(item);
        *to++ = span.start;
        *to++ = span.stop;
        *to++ = span.slot;
    }
}
