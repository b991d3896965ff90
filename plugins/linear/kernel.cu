// rows x packed weight -> rows, for up to 32 rows: bound by reading the weight, once.
//
// The work, steps of 128 of K of groups of 256 columns, is cut into equal runs of bytes, one a
// block. 8 warps: n-tile of 64 columns x parity of the step. Weights and rows come by the copy
// engine (ring.cuh); nothing in the loop waits for the whole block. Two blocks share a
// multiprocessor, so that one streams while the other ends, and a block of the next kernel moves in
// where one has left. A block that has part of a group's K leaves its sums; the last one of the
// group adds them in order of k (finish.cuh). No block waits for another, and no sum depends on
// who is first.
//
// The rows are what enters the product: a norm over the whole row is, but for the row's factor,
// applied by whoever made the rows (y_normed); that factor comes from x_squares at the end.
//
// Compile-time: ROW_TILES; KINDS; ROW_SCALE, whether x_squares is given; and see finish.cuh.
#include "cuda/device.cuh"
#include "linear/finish.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int CHUNKS_AT = WARPS * RING_BYTES;
constexpr int ROOM_AT = CHUNKS_AT + CHUNKS * CHUNK_BYTES;
constexpr int BARRIERS_AT = ROOM_AT + ROOM_BYTES;
constexpr int SIDE_AT = BARRIERS_AT + 8 * (WARPS * SLOTS + 2 * CHUNKS);

// One step of K.
DEVICE void add_step(Sums& sums, Weights& weights, saddr rows, int kind) {
    if ((KINDS & 1 << NVFP4) && (ONLY_NVFP4 || kind == NVFP4)) {
#pragma unroll
        for (int i = 0; i < parts_of(NVFP4); i++) {
            add_nvfp4(sums, weights.wait(), rows, i);
            weights.next();
        }
    }
    if ((KINDS & 1 << FP8) && kind == FP8) {
#pragma unroll 1
        for (int i = 0; i < parts_of(FP8); i++) {
            add_fp8(sums, weights.wait(), rows, i);
            weights.next();
        }
    }
    if ((KINDS & 1 << BF16) && kind == BF16) {
#pragma unroll 1
        for (int i = 0; i < parts_of(BF16); i++) {
            add_bf16(sums, weights.wait(), rows, i);
            weights.next();
        }
    }
}

DEVICE void clear(Sums& sums) {
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++) {
#pragma unroll
        for (int j = 0; j < 8; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) sums[m][j][i] = 0.0f;
        }
    }
}

// items: [blocks, most_items].
KERNEL void __launch_bounds__(THREADS, ROW_TILES == 1 ? 2 : 1)
linear(const u8* __restrict__ packed, const float* __restrict__ scales, const u16* x,
       const float* x_squares, const u16* residual, const u64* __restrict__ outputs,
       float* y_squares, u16* y_normed, const void* __restrict__ next_weight,
       const int4* __restrict__ items, const int2* __restrict__ strips, float4* partials,
       u32* arrivals, int most_items, int segments, int row_count, int k, float eps,
       float next_offset) {
    DYNAMIC_SHARED(memory);
    let_next_start();
    Side& side = *reinterpret_cast<Side*>(memory + SIDE_AT);
    const Results to = {scales,   strips,   residual, y_squares,   y_normed,
                        next_weight, partials, arrivals, next_offset, static_cast<float>(k),
                        eps, row_count};
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int at = static_cast<int>(blockIdx.x) * most_items;

    Weights weights;
    weights.packed = packed;
    weights.items = items;
    weights.item = at;
    weights.start(shared_address(memory), shared_address(memory + BARRIERS_AT));
    Rows rows;
    rows.x = x;
    rows.items = items;
    rows.item = at;
    rows.count = row_count;
    rows.k = k;
    rows.start(memory + CHUNKS_AT, shared_address(memory + BARRIERS_AT) + 8 * WARPS * SLOTS);
    if (threadIdx.x < segments) side.outputs[threadIdx.x] = outputs[threadIdx.x];
    Item item = item_at(items, at);
    request_side(side, to, items, at, item.tiles, item.column);
    sync_block();

    wait_for_previous();
    rows.ask();
    rows.ask();
    read_squares(side, x_squares, k);

    const u32 row_at = (lane & 15) * PITCH + (warp & 1) * 2 * STEP_K + (lane >> 4 << 4);
    for (;;) {
        const bool active = warp / 2 < item.tiles;
        Sums sums;
        clear(sums);
#pragma unroll 1
        for (int step = item.k0; step < item.k1; step += 2) {
            rows.ask();
            const saddr chunk = rows.wait();
            if (active && step + (warp & 1) < item.k1) {
                add_step(sums, weights, chunk + row_at, item.kind);
            }
            rows.next();
        }
        finish(sums, side, to, reinterpret_cast<float4*>(memory + ROOM_AT), at,
               at == static_cast<int>(blockIdx.x) * most_items);
        if (item.last) break;
        item = item_at(items, ++at);
        request_side(side, to, items, at, item.tiles, item.column);
    }
}
