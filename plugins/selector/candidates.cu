// selector, first part: the TOP_K largest logits of each row, in order.
// Grid: slices of a row x rows from 1 on. Each block finds those of its slice; the last block of a
// row to finish merges the slices.
//
// Compile-time: SLICE, SLICE_THREADS; TOP_K, at most 32.
#include "cuda/vocab_slice.cuh"

constexpr int NONE = -1, BROKEN = -2;  // as an id: no candidate; the slice has a NaN
constexpr int MOST_SLICES = 32;        // a lane merges one

DEVICE uint2 entry(Largest x) {
    return make_uint2(float_bits(x.value), x.value > minus_infinity() ? x.id : NONE);
}

// Writes the slice's largest elements to `to` [TOP_K], of which x then has none. Called by the
// whole block; thread 0 writes.
DEVICE void slice_candidates(float (&x)[SLICE_HELD], uint2* to) {
    __shared__ Largest of_warp[2][SLICE_WARPS];  // of this turn and of the one before it
    Largest mine = slice_largest(x);
#pragma unroll 1
    for (int k = 0; k < TOP_K; ++k) {
        Largest best = warp_largest(mine);
        if (threadIdx.x % 32 == 0) of_warp[k % 2][threadIdx.x / 32] = best;
        sync_block();
        best = of_warp[k % 2][0];
#pragma unroll
        for (int w = 1; w < SLICE_WARPS; ++w) best = larger(best, of_warp[k % 2][w]);
        if (threadIdx.x == 0) to[k] = entry(best);
        if (best.id != mine.id) continue;
        const int at = best.id - slice_start();
#pragma unroll
        for (int i = 0; i < SLICE_HELD; ++i)
            if (slice_offset(i) == at) x[i] = minus_infinity();
        mine = slice_largest(x);
    }
}

// Merges sorted lists, lane s list s [TOP_K], in shared memory; lane k receives the k-th entry.
DEVICE Largest merge(const uint2* lists, int count) {
    const int lane = threadIdx.x;
    Largest mine{minus_infinity(), 0x7fffffff}, head = mine;
    int at = 0;
#pragma unroll 1
    for (int k = 0; k < TOP_K; ++k) {
        const bool more = lane < count && at < TOP_K;
        const uint2 next = more ? lists[lane * TOP_K + at] : make_uint2(0, NONE);
        const bool there = static_cast<int>(next.y) >= 0;
        head = there ? Largest{bits_float(next.x), static_cast<int>(next.y)}
                     : Largest{minus_infinity(), 0x7fffffff};
        const Largest best = warp_largest(head);
        at += there && head.id == best.id;
        if (lane == k) mine = best;
    }
    return mine;
}

// logits [T, width]; id_map [width] or null; ids, unary [T - 1, TOP_K], id NONE if there are fewer;
// found [T - 1, slices, TOP_K]; arrivals [T - 1], zero before and after.
KERNEL void __launch_bounds__(SLICE_THREADS, 3)
selector_candidates(const float* logits, const i32* id_map, i32* ids, float* unary, uint2* found,
                    u32* arrivals, i32 width, i32 vocab, float multiplier, float softcap) {
    __shared__ uint2 lists[MOST_SLICES * TOP_K];
    let_next_start();
    wait_for_previous();
    const int row = blockIdx.y, slices = gridDim.x;
    float x[SLICE_HELD];
    slice_load(x, logits + static_cast<i64>(row + 1) * width, width, vocab);
    bool broken = false;
#pragma unroll
    for (int i = 0; i < SLICE_HELD; ++i) broken = broken || x[i] != x[i];
    __shared__ bool any_broken;
    if (threadIdx.x == 0) any_broken = false;
    sync_block();
    if (broken) any_broken = true;  // slice_candidates synchronises
    uint2* const of_row = found + static_cast<i64>(row) * slices * TOP_K;
    slice_candidates(x, of_row + blockIdx.x * TOP_K);
    if (threadIdx.x == 0 && any_broken) of_row[blockIdx.x * TOP_K].y = BROKEN;
    if (!last_to_arrive(arrivals + row, slices)) return;

    bool odd = false;
    for (int i = threadIdx.x; i < slices * TOP_K; i += SLICE_THREADS) {
        const u32* const words = &of_row[i].x;
        lists[i] = make_uint2(load_shared_result(words), load_shared_result(words + 1));
        odd = odd || static_cast<int>(lists[i].y) == BROKEN;
    }
    if (threadIdx.x == 0) any_broken = false;
    sync_block();
    if (odd) any_broken = true;
    sync_block();
    if (threadIdx.x >= 32) return;
    const Largest mine = merge(lists, slices);
    if (threadIdx.x >= TOP_K) return;
    const bool there = !any_broken && mine.value > minus_infinity();
    float own = mine.value * multiplier;
    if (softcap > 0.0f) own = softcap * tanhf(own / softcap);
    const int at = row * TOP_K + static_cast<int>(threadIdx.x);
    ids[at] = !there ? NONE : id_map ? id_map[mine.id] : mine.id;
    unary[at] = there ? own : minus_infinity();
}
