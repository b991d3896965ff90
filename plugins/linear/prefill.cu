// rows x packed weight -> rows for more than 32 rows: bound by the matrix units, not by memory.
//
// A block makes TILE_ROWS rows x 256 packed columns (up to four n-tiles of a group) at a time: a
// warp owns 64 rows x one n-tile of 64 columns, 128 float32 sums a lane. K goes by in steps of 64
// through a ring in shared memory: rows by asynchronous copies (swizzled for load_matrix4), weights
// by bulk copies as they are stored; every warp dequantises its own fragments in registers, so no
// bf16 copy of a weight exists. The fragments of the next 16 of K are loaded while the products of
// this 16 run. Blocks are persistent: the ring runs ahead into the next item, over its epilogue.
//
// Items go row tile first, so that the blocks that run together share their weights in L2. The last
// tiles, where they leave more than half the blocks idle, are cut in two by rows. A row's sums are
// made in order of k, whatever T and wherever the row lies.
//
// Compile-time: TILE_ROWS 64 or 128; KINDS, the weight kinds of the launch (1 << kind), of which one is
// NVFP4 in narrow tiles; EPILOGUE as below.
#include "cuda/device.cuh"
#include "linear/fragments.cuh"

enum { NONE, SWIGLU, RESIDUAL };

constexpr int STAGES = 4;  // of the ring
constexpr int TILES = 4;   // n-tiles of a group, and warps side by side
constexpr int WARPS = TILE_ROWS / 64 * TILES;
constexpr int THREADS = 32 * WARPS;
constexpr int STEP = 64;  // of K
constexpr int ROWS_BYTES = TILE_ROWS * ROW_BYTES;
// One n-tile in one step, as stored; the ring has room for the largest kind of the launch.
DEVICE constexpr int unit_bytes(int kind) {
    return step_bytes(kind == NARROW ? NVFP4 : kind) * STEP / STEP_K;
}
constexpr int UNIT_BYTES = unit_bytes(KINDS & 1 << BF16 ? BF16 : KINDS & 1 << FP8 ? FP8 : NVFP4);
constexpr int SLOT_BYTES = ROWS_BYTES + TILES * UNIT_BYTES;
constexpr int AT_ONCE = THREADS / 8;  // rows that one pass of the block copies
constexpr int PASSES = TILE_ROWS / AT_ONCE;
static_assert(TILE_ROWS == 64 || TILE_ROWS == 128, "TILE_ROWS");

struct Group {
    u32 offset;  // into the packed weight, in units of 512 bytes
    int kind;
    int stride;  // n-tiles of the stored group
    int tiles;
    int column;  // first packed column
};

struct Call {
    const u16* x;
    const u8* weights;
    const int4* groups;
    int rows, width, row_tiles, steps;
    int whole;  // tiles that are one item; the others are two, of half the rows
    int items;
};

struct Item {
    Group group;
    int row, height;
};

DEVICE Item item_of(const Call& call, int index) {
    const int half = index - call.whole;
    const int tile = half < 0 ? index : call.whole + half / 2;
    const int4 g = call.groups[tile / call.row_tiles];
    const int row = tile % call.row_tiles * TILE_ROWS;
    return {{static_cast<u32>(g.x), g.y & 255, g.y >> 8, g.z, g.w},
            half < 0 ? row : row + half % 2 * (TILE_ROWS / 2),
            half < 0 ? TILE_ROWS : TILE_ROWS / 2};
}

// The step that is requested next. One item's steps follow the other's.
struct Ahead {
    int item, step, slot;
    const u8* weights;
    u32 bytes;  // of one n-tile in one step
    int tiles, stride;
    const u16* rows;  // of this thread's first row and 16 bytes, at k = 0
    int rows_left;    // from this thread's first row on

    DEVICE void start(const Call& call) {
        step = 0;
        if (item >= call.items) return;
        const Item next = item_of(call, item);
        weights = call.weights + static_cast<u64>(next.group.offset) * 512;
        bytes = unit_bytes(next.group.kind);
        tiles = next.group.tiles;
        stride = next.group.stride;
        const int row = threadIdx.x / 8;
        rows = call.x + static_cast<i64>(next.row + row) * call.width + threadIdx.x % 8 * 8;
        rows_left = min(next.height, call.rows - next.row) - row;
    }
    DEVICE void advance(const Call& call) {
        slot = slot + 1 == STAGES ? 0 : slot + 1;
        if (++step < call.steps) return;
        item += gridDim.x;
        start(call);
    }
};

// Stored order of a group: 128 of K, n-tile, 64 of K.
DEVICE void fetch_weights(const Call& call, const Ahead& at, saddr ring, saddr full) {
    if (at.item >= call.items || threadIdx.x >= TILES) return;
    const int tile = threadIdx.x;
    const bool there = tile < at.tiles;
    barrier_expect(full + 8 * at.slot, there ? at.bytes : 0);
    if (!there) return;
    const int unit = ((at.step >> 1) * at.stride + tile) * 2 + (at.step & 1);
    copy_bulk_kept(ring + at.slot * SLOT_BYTES + ROWS_BYTES + tile * UNIT_BYTES,
                   at.weights + static_cast<u64>(unit) * at.bytes, at.bytes, full + 8 * at.slot);
}

// Pass `i` of the block over the rows. Sixteen bytes `c` of row `r` lie at chunk c ^ (r % 8):
// load_matrix4 meets no bank twice.
DEVICE void fetch_rows(const Call& call, const Ahead& at, saddr ring, int i) {
    if (at.item >= call.items) return;
    const int chunk = threadIdx.x % 8, row = threadIdx.x / 8;
    copy_async16(ring + at.slot * SLOT_BYTES + (i * AT_ONCE + row) * ROW_BYTES +
                     ((chunk ^ (row & 7)) << 4),
                 at.rows + static_cast<i64>(i * AT_ONCE) * call.width + at.step * STEP,
                 at.step * STEP + chunk * 8 < call.width && i * AT_ONCE < at.rows_left);
}

// All of it. Commits also where nothing is left: the waits count commits.
DEVICE void fetch_rows(const Call& call, const Ahead& at, saddr ring) {
#pragma unroll
    for (int i = 0; i < PASSES; i++) fetch_rows(call, at, ring, i);
    copy_async_commit();
}

// What a warp keeps in mind while it reads the ring.
struct Reader {
    saddr ring, full;
    int slot;
    u32 parity;
    u32 lane_row;  // of the lane's row and half within a slot; the item decides
    u32 unit;      // of the warp's n-tile within a slot

    DEVICE saddr rows_at() const { return ring + slot * SLOT_BYTES + lane_row; }
    DEVICE saddr unit_at() const { return ring + slot * SLOT_BYTES + unit; }

    // Until the slot's step is in, for all. Nobody reads the slot before it any more: `refill`.
    DEVICE void acquire() const {
        copy_async_wait<STAGES - 2>();
        barrier_wait(full + 8 * slot, parity);
        sync_block();
    }
    // In parts, for between the products.
    DEVICE void refill(const Call& call, Ahead& ahead, int part) const {
        if (part == 0) fetch_weights(call, ahead, ring, full);
        if (part > 0 && part <= PASSES) fetch_rows(call, ahead, ring, part - 1);
        if (part == PASSES) copy_async_commit();
        if (part == PASSES + 1) ahead.advance(call);
    }
    DEVICE void next() {
        slot = slot + 1 == STAGES ? 0 : slot + 1;
        parity ^= slot == 0;
    }
};

template <int M> using Sums = float[M][8][4];  // [16 rows][8 columns][fragment]

template <int KIND, int M>
DEVICE void multiply(Sums<M>& sums, const Call& call, Reader& reader, Ahead& ahead) {
    Fragments<KIND, M> loaded[2];
    reader.acquire();
    loaded[0].load(reader.rows_at(), reader.unit_at(), 0, loaded[1]);
#pragma unroll 1
    for (int step = 1; step <= call.steps; step++) {
#pragma unroll
        for (int k16 = 0; k16 < STEP / 16; k16++) {
            Fragments<KIND, M>& now = loaded[k16 % 2];
            Fragments<KIND, M>& then = loaded[(k16 + 1) % 2];
            if (k16 < 3) {
                then.load(reader.rows_at(), reader.unit_at(), k16 + 1, now);
            } else {
                received(now.last());
                reader.next();
                if (step < call.steps) {
                    reader.acquire();
                    then.load(reader.rows_at(), reader.unit_at(), 0, now);
                }
            }
            u32 b[2][4];
            now.strips(b[0], k16, 0);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (j < 3) now.strips(b[(j + 1) % 2], k16, j + 1);
#pragma unroll
                for (int m = 0; m < M; m++) {
                    mma_bf16(sums[m][2 * j], now.rows[m], b[j % 2][0], b[j % 2][1]);
                    mma_bf16(sums[m][2 * j + 1], now.rows[m], b[j % 2][2], b[j % 2][3]);
                }
                reader.refill(call, ahead, k16 * 4 + j);
            }
        }
    }
}

DEVICE float silu(float x) { return x / (1.0f + expf(-x)); }

struct Finish {
    const float* scales;
    const int2* strips;  // of 8 columns: segment << 24 | column, or -1; width of the segment
    const u16* residual;
    u16* const* outputs;
};

// Where one lane's two columns of a strip go, and their scales. `y` and `width` are those of the
// first strip where there is but one segment.
struct Target {
    int column;  // below 0: nowhere
    int width;
    u16* y;
    float2 scales, up;

    DEVICE void find(const Finish& f, int packed, const Target& first) {
        const int2 strip = f.strips[packed / 8];
        column = strip.x < 0 ? -1 : (strip.x & 0xffffff) + packed % 8;
        if (column >= strip.y) column = -1;  // a segment may end inside a strip
        width = EPILOGUE == NONE || this == &first ? strip.y : first.width;
        const int segment = strip.x < 0 ? 0 : strip.x >> 24;
        y = EPILOGUE == NONE || this == &first ? f.outputs[segment] : first.y;
        scales = *reinterpret_cast<const float2*>(f.scales + packed);
        if (EPILOGUE == SWIGLU) up = *reinterpret_cast<const float2*>(f.scales + packed + 8);
    }
    DEVICE i64 at(int row) const { return static_cast<i64>(row) * width + column; }
};

// What is added to a strip: two columns of every eighth row from `row` on.
template <int M>
DEVICE void fetch_residual(u32 (&to)[2 * M], const Target& target, const u16* residual, int row,
                           int rows) {
    if (EPILOGUE != RESIDUAL) return;
#pragma unroll
    for (int i = 0; i < 2 * M; i++) {
        const bool there = target.column >= 0 && row + i * 8 < rows;
        to[i] = there ? *reinterpret_cast<const u32*>(residual + target.at(row + i * 8)) : 0;
    }
}

// `column`: packed, of the warp's n-tile; `row`: first of the warp's 16 M. Loads come well before
// the stores that they could not pass.
template <int M>
DEVICE void finish(const Sums<M>& sums, const Call& call, const Finish& f, int column, int row) {
    constexpr int STRIDE = EPILOGUE == SWIGLU ? 2 : 1;
    const int lane = threadIdx.x % 32, pair = lane % 4 * 2;
    row += lane / 4;
    Target targets[8];
#pragma unroll
    for (int j = 0; j < 8; j += STRIDE) targets[j].find(f, column + j * 8 + pair, targets[0]);
    u32 added[2][2 * M];
    fetch_residual<M>(added[0], targets[0], f.residual, row, call.rows);
#pragma unroll
    for (int j = 0; j < 8; j += STRIDE) {
        const Target& target = targets[j];
        if (j < 7)
            fetch_residual<M>(added[(j + 1) % 2], targets[j + 1], f.residual, row, call.rows);
        if (target.column < 0) continue;
#pragma unroll
        for (int i = 0; i < 2 * M; i++) {
            if (row + i * 8 >= call.rows) break;
            float low = sums[i / 2][j][i % 2 * 2] * target.scales.x;
            float high = sums[i / 2][j][i % 2 * 2 + 1] * target.scales.y;
            if (EPILOGUE == SWIGLU) {
                low = silu(low) * (sums[i / 2][j + 1][i % 2 * 2] * target.up.x);
                high = silu(high) * (sums[i / 2][j + 1][i % 2 * 2 + 1] * target.up.y);
            }
            if (EPILOGUE == RESIDUAL) {
                low += bf16x2_low(added[j % 2][i]);
                high += bf16x2_high(added[j % 2][i]);
            }
            *reinterpret_cast<u32*>(target.y + target.at(row + i * 8)) = pack_bf16x2(low, high);
        }
    }
}

// One item, for a warp: 16 M rows, the n-tile `tile` of the group.
template <int M>
DEVICE void work(const Item& item, const Call& call, const Finish& f, Reader& reader,
                 Ahead& ahead) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int tile = warp % TILES, down = warp / TILES * 16 * M, kind = item.group.kind;
    if (tile >= item.group.tiles || item.row + down >= call.rows) {
        for (int step = 0; step < call.steps; step++) {
            reader.acquire();
            for (int part = 0; part < PASSES + 2; part++) reader.refill(call, ahead, part);
            reader.next();
        }
        return;
    }
    reader.lane_row = static_cast<u32>((down + lane % 16) * ROW_BYTES) +
                      static_cast<u32>((lane / 16 ^ (lane & 7)) << 4);
    Sums<M> sums = {};
    if ((KINDS & 1 << NVFP4) && kind == NVFP4) multiply<NVFP4, M>(sums, call, reader, ahead);
    if ((KINDS & 1 << NARROW) && kind == NARROW) multiply<NARROW, M>(sums, call, reader, ahead);
    if ((KINDS & 1 << FP8) && kind == FP8) multiply<FP8, M>(sums, call, reader, ahead);
    if ((KINDS & 1 << BF16) && kind == BF16) multiply<BF16, M>(sums, call, reader, ahead);
    finish<M>(sums, call, f, item.group.column + tile * 64, item.row + down);
}

KERNEL void __launch_bounds__(THREADS, TILE_ROWS == 64 ? 2 : 1)
linear_prefill(const u16* x, const u8* __restrict__ weights, const float* __restrict__ scales,
               const int4* __restrict__ groups, const int2* __restrict__ strips,
               const u16* residual, u16* const* __restrict__ outputs, int rows, int width,
               int group_count, int whole) {
    DYNAMIC_SHARED(shared);
    const saddr ring = shared_address(shared), full = ring + STAGES * SLOT_BYTES;
    const int row_tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    const Call call = {x,     weights,
                       groups, rows,
                       width, row_tiles,
                       (width + STEP - 1) / STEP, whole,
                       2 * row_tiles * group_count - whole};
    const Finish f = {scales, strips, residual, outputs};
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) barrier_init(full + 8 * i, TILES);
        barrier_init_done();
    }
    sync_block();

    // Weights never change; rows are what the kernel before wrote.
    Ahead ahead = {static_cast<int>(blockIdx.x)};
    ahead.start(call);
    const Ahead first = ahead;
    for (int i = 0; i < STAGES - 1; i++) {
        fetch_weights(call, ahead, ring, full);
        ahead.advance(call);
    }
    let_next_start();
    wait_for_previous();
    ahead = first;
    for (int i = 0; i < STAGES - 1; i++) {
        fetch_rows(call, ahead, ring);
        ahead.advance(call);
    }

    Reader reader = {ring, full, 0, 0, 0,
                     static_cast<u32>(ROWS_BYTES + threadIdx.x / 32 % TILES * UNIT_BYTES)};
#pragma unroll 1
    for (int index = blockIdx.x; index < call.items; index += gridDim.x) {
        const Item item = item_of(call, index);
        if (TILE_ROWS == 64 || item.height == TILE_ROWS)
            work<4>(item, call, f, reader, ahead);
        else
            work<2>(item, call, f, reader, ahead);
    }
    copy_async_wait<0>();
}
