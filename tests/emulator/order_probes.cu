// The order in which linear's producer warp requests copies and waits: nothing is copied and no wait
// takes time.
#include "cuda/device.cuh"

enum { END, WEIGHTS, SLABS, WAIT, PREVIOUS };

// what happened, address of the barrier, bytes
static int* next_event;
DEVICE void record(int what, u32 barrier, u32 bytes) {
    if (threadIdx.x != 0) return;
    next_event[0] = what, next_event[1] = static_cast<int>(barrier);
    next_event[2] = static_cast<int>(bytes), next_event += 3;
}

#define copy_bulk(to, from, bytes, barrier) record(WEIGHTS, barrier, bytes)
#define copy_bulk_kept(to, from, bytes, barrier) record(SLABS, barrier, bytes)
#define barrier_wait(barrier, parity) record(WAIT, barrier, 0)
#define wait_for_previous() record(PREVIOUS, 0, 0)
#define barrier_expect(barrier, bytes)
#define barrier_announce(barrier, bytes)
#define barrier_arrive(barrier)
#define cluster_wait()
#include "linear/decode.cu"

// Lane 0 only, which requests everything if a stage is one step of full rows.
KERNEL void order(int* events, const int4* items) {
    next_event = events;
    TileIterator at;
    at.table = items;
    at.at = 0;
    at.halves = halves_of(0);
    at.start(entry_at(items));
    PipelineState state;
    state.start(0, 0);
    const PartialSumBuffer partials = {0, 0, 0};
    const saddr early = 1024;
    produce({nullptr, nullptr, ROWS}, state, at, early, {nullptr, nullptr, 0, 0.0f, 0},
        {nullptr, nullptr, 0}, partials);
}
