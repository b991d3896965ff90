// head, second part: the best id of each row of logits.
// Grid: slices of a row x rows. The last block of a row to finish combines the row's slices.
#include "cuda/vocab_slice.cuh"

constexpr int BROKEN = -1;  // as a slice's id: the slice has a NaN

// logits [T, width]; id_map [width] or null; best [T]; found [T, slices] value and id;
// arrivals [T], zero before and after.
KERNEL void __launch_bounds__(SLICE_THREADS, 4)
head_best(const float* logits, const i32* id_map, i32* best, uint2* found, u32* arrivals,
          i32 width, i32 vocab) {
    let_next_start();
    wait_for_previous();
    const int row = blockIdx.y, slices = gridDim.x;
    float x[SLICE_HELD];
    slice_load(x, logits + static_cast<i64>(row) * width, width, vocab);
    bool broken = false;
#pragma unroll
    for (int i = 0; i < SLICE_HELD; ++i) broken = broken || x[i] != x[i];
    bool any_broken;
    const Largest here = block_largest(slice_largest(x), broken, any_broken);
    uint2* const of_row = found + row * slices;
    if (threadIdx.x == 0)
        of_row[blockIdx.x] = make_uint2(float_bits(here.value), any_broken ? BROKEN : here.id);
    if (!last_to_arrive(arrivals + row, slices) || threadIdx.x >= 32) return;

    Largest all{minus_infinity(), 0x7fffffff};
    bool row_broken = false;
    for (int s = threadIdx.x; s < slices; s += 32) {
        const u32* const words = &of_row[s].x;
        const int id = static_cast<int>(load_shared_result(words + 1));
        row_broken = row_broken || id == BROKEN;
        all = larger(all, {bits_float(load_shared_result(words)), id});
    }
    all = warp_largest(all);
    row_broken = ballot(row_broken) != 0;
    if (threadIdx.x == 0) best[row] = row_broken ? -1 : id_map ? id_map[all.id] : all.id;
}
