// rows x packed weight -> rows, for up to 32 rows: bound by reading the weight, once.
//
// Persistent blocks; the work, steps of 128 of K of groups of 256 columns, is cut into equal runs of
// bytes, one a block. 8 warps: n-tile of 64 columns x half a step. Each warp streams its own weights
// through a ring (ring.cuh), filled before the kernel before this one has ended; rows are staged by
// all warps, a chunk of 256 of K ahead (stage.cuh). A block that has part of a group's K leaves its
// sums; the last one of the group adds them in order of k (finish.cuh). No block waits for another,
// and no sum depends on who is first.
//
// Compile-time: see the parts; all of one kernel's are in launch.py.
#include "cuda/device.cuh"
#include "linear/finish.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int ROOM_AT = WARPS * RING_BYTES;
constexpr int BARRIERS_AT = ROOM_AT + 2 * CHUNK_BYTES;
constexpr int SIDE_AT = BARRIERS_AT + WARPS * STAGES * 8;

// One half of one step.
DEVICE void add_step(Sums& sums, Ring& ring, saddr rows, int kind) {
    if ((KINDS & 1 << NVFP4) && (ONLY_NVFP4 || kind == NVFP4)) {
        ring.wait();
        add_nvfp4(sums, ring.slot, rows);
        ring.next();
    }
    if ((KINDS & 1 << FP8) && kind == FP8) {
#pragma unroll
        for (int i = 0; i < slots_of(FP8); i++) {
            ring.wait();
            add_fp8(sums, ring.slot, rows, i);
            ring.next();
        }
    }
    if ((KINDS & 1 << BF16) && kind == BF16) {
#pragma unroll
        for (int i = 0; i < slots_of(BF16); i++) {
            ring.wait();
            add_bf16(sums, ring.slot, rows, i);
            ring.next();
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

// blocks: first item, end, steps. lead: the next kernel may start when so many steps are left.
KERNEL void __launch_bounds__(THREADS, 2)
linear(const u8* __restrict__ packed, const float* __restrict__ scales, const u16* x,
       const float* x_squares, const void* norm_weight, const u16* gate, const u16* residual,
       const u64* __restrict__ outputs, float* y_squares, const int4* __restrict__ blocks,
       const int4* __restrict__ items, const int2* __restrict__ strips, float4* partials,
       u32* arrivals, int segments, int row_count, int k, int head_dim, float eps, float offset,
       int lead) {
    DYNAMIC_SHARED(memory);
    u8* const chunks = memory + ROOM_AT;
    Side& side = *reinterpret_cast<Side*>(memory + SIDE_AT);
    const Rows rows = {x, norm_weight, gate, row_count, k, head_dim, eps, offset};
    const Results to = {scales, strips, residual, y_squares, partials, arrivals, row_count};
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

    const int4 block = blocks[blockIdx.x];
    Ring ring;
    ring.packed = packed;
    ring.items = items;
    ring.item = block.x;
    ring.last = block.y;
    ring.start(shared_address(memory), shared_address(memory + BARRIERS_AT));
    if (threadIdx.x < segments) side.outputs[threadIdx.x] = outputs[threadIdx.x];
    int at = block.x, left = block.z;
    Item item = item_at(items, at);
    request_side(side, to, items, at, item.tiles, item.column);

    wait_for_previous();
    Pieces pieces;
    fetch(pieces, rows, 0, item.k0 * STEP_K, item.k1 * STEP_K);
    RowScales row_scales;
    read_scales(row_scales, rows, x_squares);

    // This lane's row of the first row tile, its half of a step, 16-byte columns xor-ed.
    const saddr row_at = shared_address(chunks) + (lane & 15) * CHUNK_ROW + (warp & 1) * 128 +
                         (((lane >> 4) ^ (lane & 7)) << 4);
    for (;;) {
        store(chunks, pieces, rows, 0, row_scales);
        if (ROW_TILES == 2) {
            fetch(pieces, rows, 1, item.k0 * STEP_K, item.k1 * STEP_K);
            store(chunks, pieces, rows, ROW_TILES - 1, row_scales);
        }
        sync_block();
        const bool active = warp < 2 * item.tiles;
        const int4 next = at + 1 < block.y ? items[ITEM_WORDS * (at + 1)] : make_int4(0, 0, 0, 0);
        u8* chunk = chunks;
        Sums sums;
        clear(sums);
#pragma unroll 1
        for (int step = item.k0;; step += 2) {
            const bool ends = step + 2 >= item.k1;
            const int first = (ends ? next.y : step + 2) * STEP_K;
            const int end = (ends ? next.z : item.k1) * STEP_K;
            const saddr half = row_at + static_cast<u32>(chunk - chunks);
            u8* const other = chunks + (chunks + CHUNK_BYTES - chunk);
            if (!ends || ROW_TILES == 1) fetch(pieces, rows, 0, first, end);
            if (left <= lead) let_next_start();
            left -= 2;
            if (active) add_step(sums, ring, half, item.kind);
            if (!ends && ROW_TILES == 2) {
                store(other, pieces, rows, 0, row_scales);
                fetch(pieces, rows, 1, first, end);
            }
            if (active && step + 1 < item.k1) {
                add_step(sums, ring, half + 2 * STEP_K, item.kind);
            }
            if (ends) break;
            store(other, pieces, rows, ROW_TILES - 1, row_scales);
            chunk = other;
            sync_block();
        }
        finish(sums, side, to, reinterpret_cast<float4*>(chunks), at & 1);
        if (++at == block.y) break;
        item = item_at(items, at);
        request_side(side, to, items, at, item.tiles, item.column);
        if (ROW_TILES == 2) fetch(pieces, rows, 0, item.k0 * STEP_K, item.k1 * STEP_K);
        sync_block();
    }
}
