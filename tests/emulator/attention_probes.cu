// Small kernels for test_verify_attention_kernel.py: parts of verify_attention by themselves.
#include "verify_attention/split_kv.cuh"
#include "verify_attention/qkv_rows.cuh"

KERNEL void angles_of(const float* in, float* out) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    cosine_sine(in[i], out[2 * i], out[2 * i + 1]);
}

KERNEL void quotients(const float* in, const float* by, float* out) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = divide(in[i], make_float2(*by, 1.0f / *by));
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

// Of each thread block of a call (first position of the rows, end, number of blocks): its first
// piece, the distance to its next one, the first of its halves of the heads, and how many.
KERNEL void shares(const i32* calls, i32* out) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const int blocks = calls[3 * i + 2];
    for (int block = 0; block < blocks; block++) {
        const Pieces pieces = divided(calls[3 * i], calls[3 * i + 1], block, blocks);
        i32* const to = out + (i * 2 * PIECES + block) * 4;
        to[0] = pieces.item, to[1] = pieces.stride;
        to[2] = pieces.heads.first, to[3] = pieces.heads.count;
    }
}
