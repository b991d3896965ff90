// Searching a row of logits: one block of SLICE_THREADS threads holds SLICE elements of it in
// registers. The cut depends only on the element's index, so a row's result is independent of
// others.
#pragma once
#include "cuda/device.cuh"

constexpr int SLICE_WARPS = SLICE_THREADS / 32;
constexpr int SLICE_LOADS = SLICE / (4 * SLICE_THREADS);

DEVICE float minus_infinity() { return bits_float(0xff800000u); }

// Index in the row of this thread's first element. Its i-th element, i < SLICE_HELD, lies
// slice_offset(i) further: groups of four neighbours, SLICE_THREADS * 4 apart. To test a bound,
// subtract slice_start() from it once and compare with slice_offset(i), which is a constant: full
// indices would cost a register each.
constexpr int SLICE_HELD = SLICE_LOADS * 4;
DEVICE int slice_start() { return blockIdx.x * SLICE + threadIdx.x * 4; }
DEVICE constexpr int slice_offset(int i) { return i / 4 * SLICE_THREADS * 4 + i % 4; }

// Loads this thread's elements of `row` [width], minus infinity from `limit` on. Rows that are not
// 16-byte aligned are read element by element.
DEVICE void slice_load(float (&x)[SLICE_HELD], const float* row, int width, int limit) {
    const int left = limit - slice_start();
    const float* const here = row + slice_start();
    const bool wide = width % 4 == 0;
#pragma unroll
    for (int i = 0; i < SLICE_HELD; i += 4) {
        float4 four = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (wide && slice_offset(i) < left)
            four = *reinterpret_cast<const float4*>(here + slice_offset(i));
        x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
    }
    if (!wide) {
#pragma unroll
        for (int i = 0; i < SLICE_HELD; ++i)
            if (slice_offset(i) < left) x[i] = here[slice_offset(i)];
    }
#pragma unroll
    for (int i = 0; i < SLICE_HELD; ++i)
        if (slice_offset(i) >= left) x[i] = minus_infinity();
}

struct Largest {
    float value;
    int id;
};

// The larger of two; among equals, the one with the smaller id. Neither may be NaN.
DEVICE Largest larger(Largest a, Largest b) {
    const bool second = b.value > a.value || (b.value == a.value && b.id < a.id);
    return second ? b : a;
}

// The largest of this thread's elements. NaN is skipped; if all are minus infinity, the first
// element.
DEVICE Largest slice_largest(const float (&x)[SLICE_HELD]) {
    Largest best{minus_infinity(), 0};
#pragma unroll
    for (int i = 0; i < SLICE_HELD; ++i)
        if (x[i] > best.value) best = {x[i], slice_offset(i)};
    best.id += slice_start();
    return best;
}

DEVICE Largest warp_largest(Largest best) {
#pragma unroll
    for (int mask = 16; mask; mask /= 2)
        best = larger(best, {shuffle_xor(best.value, mask), shuffle_xor(best.id, mask)});
    return best;
}

// The largest over the block, and whether any thread's `fault` is set; every thread gets both.
DEVICE Largest block_largest(Largest best, bool fault, bool& any_fault) {
    __shared__ Largest of_warp[SLICE_WARPS];
    __shared__ u32 fault_of_warp[SLICE_WARPS];
    best = warp_largest(best);
    const u32 faults = ballot(fault);
    if (threadIdx.x % 32 == 0) {
        of_warp[threadIdx.x / 32] = best;
        fault_of_warp[threadIdx.x / 32] = faults;
    }
    sync_block();
    best = of_warp[0];
    any_fault = fault_of_warp[0] != 0;
#pragma unroll
    for (int w = 1; w < SLICE_WARPS; ++w) {
        best = larger(best, of_warp[w]);
        any_fault = any_fault || fault_of_warp[w] != 0;
    }
    return best;
}

// Whether this block is the last of `blocks` to arrive; the counter is then reset to zero. Every
// thread of the last block sees what thread 0 of each other block wrote before arriving.
DEVICE bool last_to_arrive(u32* counter, u32 blocks) {
    __shared__ bool last;
    if (threadIdx.x == 0) {
        last = arrive(counter) == blocks - 1;
        if (last) {
            fence_device();
            *counter = 0;
        }
    }
    sync_block();
    return last;
}
