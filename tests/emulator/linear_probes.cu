// What linear's decode kernel reads from memory, and where its results belong, for weights of any size:
// requests are counted instead of made. Each adds 1 to the first of every UNIT bytes, or to the second
// if it is for data that others read too. So a weight that is larger than the counted part needs no
// memory for the rest.
#include "cuda/device.cuh"

constexpr u32 UNIT = 64;

DEVICE void count_request(const void* from, u32 bytes, int kept = 0) {
    u8* const counts = static_cast<u8*>(const_cast<void*>(from)) + kept;
    for (u32 i = 0; i < bytes; i += UNIT) counts[i]++;
}

#define prefetch_bulk(from, bytes) count_request(from, bytes)
#define copy_bulk(to, from, bytes, barrier) count_request(from, bytes)
#define copy_bulk_kept(to, from, bytes, barrier) count_request(from, bytes, 1)
#define barrier_expect(barrier, bytes)
#define barrier_announce(barrier, bytes)
#include "linear/epilogue_tiles.cuh"

// The copies of one lane of the producer warp per thread, over all stages of a block. `counts`: as
// above; `slabs`: of the rows, for each cluster.
KERNEL void requested(u8* counts, u8* slabs, const int4* items, int most_items, int rows, int first) {
    TileIterator at;
    at.table = items;
    at.at = blockIdx.x / PARTS * most_items * 2;
    at.halves = halves_of(blockIdx.x % PARTS);
    at.start(entry_at(items + at.at));
    const int slab_bytes = (K_SIZE + SLAB_COLUMNS - 1) / SLAB_COLUMNS * rows * SLAB_ROW;
    const Source source = {counts - static_cast<i64>(first) * 512,
                           slabs + blockIdx.x / PARTS * slab_bytes, rows};
    PipelineState state;
    state.start(0, 0);
    NextStage next_stage = {source, state, at, {}, false};
    while (!next_stage.at.over) {
        next_stage.prepare();
        source.copy_weights(next_stage.copies, next_stage.state, 0);
        source.copy_rows(next_stage.copies, next_stage.state);
        next_stage.pass();
    }
}
