// rows x packed weight -> rows for more than 32 rows: bound by the matrix units, not by memory.
//
// A block computes one output tile of TILE_ROWS rows x 256 packed columns (up to four n-tiles of a
// group) at a time. A warp owns all of its rows x half an n-tile (32 columns), so that a block
// decodes every weight once, in registers, and no bf16 copy exists. K is processed in steps of 64,
// each one stage of a ring in shared memory that bulk copies fill with rows (in slabs: activation_slabs.cuh)
// and weights. There is no producer warp: all warps multiply, and each issues the copies of every
// WARPS'th step. They synchronise only at the mbarriers of the stages. Blocks are persistent: the
// ring is filled for the next item while the epilogue of the current one runs.
//
// A warp scheduler needs six to seven clocks to issue a matrix product, and issues nothing else in
// that time; speed depends on the number of other instructions per product.
//
// Row tiles vary fastest in the order of items, so that concurrent blocks share weights in L2. The
// number of n-tiles per item, and how many of the last tiles are cut in two by rows, are chosen so
// that blocks finish together (prefill_launch.py). A row's sums are made in order of k,
// independently of T, of the row's place and of how items are cut.
//
// Compile-time: TILE_ROWS 64 or 128; STAGES of the ring; KINDS, the weight kinds of the launch
// (1 << kind), where NARROW is a kind of its own; EPILOGUE as below; BIAS 1 if segments have biases.
#include "cuda/device.cuh"
#include "linear/fragments.cuh"

enum { NONE, SWIGLU, RESIDUAL, GELU_TANH = 4, GELU_ERF };
#ifndef BIAS
#define BIAS 0
#endif

constexpr int TILES = 4;  // most n-tiles of an item
constexpr int WARPS = 2 * TILES;
constexpr int THREADS = 32 * WARPS;
constexpr int STEP = SLAB_COLUMNS;  // of K
constexpr int ROWS_BYTES = TILE_ROWS * SLAB_ROW;
// Bytes of one n-tile in one step, as stored; a stage fits the launch's largest kind.
DEVICE constexpr int unit_bytes(int kind) {
    return step_bytes(kind == NARROW ? NVFP4 : kind) * STEP / STEP_K;
}
constexpr int UNIT_BYTES = unit_bytes(KINDS & 1 << BF16 ? BF16 : KINDS & 1 << FP8 ? FP8 : NVFP4);
constexpr int STAGE_BYTES = ROWS_BYTES + TILES * UNIT_BYTES;
static_assert(TILE_ROWS == 64 || TILE_ROWS == 128, "TILE_ROWS");
static_assert(STAGE_BYTES % SLAB_ROW == 0, "Place::load xors the bits below");
// While step s is read, step s + AHEAD is requested. It uses the stage of step s - 1, which the
// other warps have nearly always released by then.
constexpr int AHEAD = STAGES - 1;
static_assert(AHEAD > 0 && AHEAD <= WARPS, "a warp copies one of the first steps at most");

struct Group {
    u32 offset;  // into the packed weight, in units of 512 bytes
    int kind;
    int stride;  // n-tiles of the stored group
    int tiles;
    int column;  // first packed column
};

struct Params {
    const u8* slabs;
    const u8* weights;
    const int4* groups;
    int rows, row_tiles, steps;
    int whole;  // the first `whole` tiles are one item each, the others two items of half the rows
    int items;
};

struct WorkTile {
    Group group;
    int row, height;
};

DEVICE WorkTile item_of(const Params& params, int index) {
    const int half = index - params.whole;
    const int tile = half < 0 ? index : params.whole + half / 2;
    const int4 g = params.groups[tile / params.row_tiles];
    const int row = tile % params.row_tiles * TILE_ROWS;
    return {{static_cast<u32>(g.x), g.y & 255, g.y >> 8, g.z, g.w},
            half < 0 ? row : row + half % 2 * (TILE_ROWS / 2),
            half < 0 ? TILE_ROWS : TILE_ROWS / 2};
}

// A stage of the ring, and the parity of its barriers' current phase. `full`: the announced bytes
// have arrived. `empty`: all threads have read the stage.
struct PipelineState {
    saddr stages, full, empty;
    int stage;
    u32 parity;

    DEVICE saddr bytes() const { return stages + stage * STAGE_BYTES; }
    DEVICE saddr filled() const { return full + 8 * stage; }
    DEVICE saddr read() const { return empty + 8 * stage; }
    // `count`: WARPS at most.
    DEVICE void next(int count = 1) {
        stage += count;
#pragma unroll
        for (int i = 0; i < (WARPS + STAGES - 1) / STAGES && i < count; i++) {
            const bool wrap = stage >= STAGES;
            stage -= wrap ? STAGES : 0;
            parity ^= wrap;
        }
    }
};

// The step that a warp requests next: every WARPS'th step of the block, counted across its items.
struct Producer {
    PipelineState state;
    int item, step;
    const u8* weights;  // of the item's first n-tile and step
    const u8* rows;
    u32 unit, row_bytes;  // bytes of one n-tile in one step; bytes of all rows in one step
    int tiles, stride;

    DEVICE bool over(const Params& params) const { return item >= params.items; }
    DEVICE void start(const Params& params) {
        if (over(params)) return;
        const WorkTile next = item_of(params, item);
        weights = params.weights + static_cast<u64>(next.group.offset) * 512;
        unit = unit_bytes(next.group.kind);
        tiles = next.group.tiles;
        stride = next.group.stride;
        rows = params.slabs + static_cast<i64>(next.row) * SLAB_ROW;
        row_bytes = max(0, min(next.height, params.rows - next.row)) * SLAB_ROW;
    }
    DEVICE void advance(const Params& params) {
        state.next(WARPS);
        step += WARPS;
        settle(params);
    }
    // A step past the item's end belongs to a later item; with few steps, it may skip some items.
    DEVICE void settle(const Params& params) {
        if (step < params.steps) return;
        while (step >= params.steps) {
            step -= params.steps;
            item += gridDim.x;
        }
        start(params);
    }

    // Announces the bytes of the whole stage, including rows, and copies the weights, one n-tile
    // per lane. A group is stored as [128 of K][n-tile][64 of K].
    DEVICE void fetch_weights(const Params& params) const {
        const int tile = threadIdx.x % 32;
        if (over(params)) return;
        if (tile == 0) barrier_expect(state.filled(), tiles * unit + row_bytes);
        sync_warp();
        if (tile >= tiles) return;
        const int at = ((step >> 1) * stride + tile) * 2 + (step & 1);
        copy_bulk_kept(state.bytes() + ROWS_BYTES + tile * UNIT_BYTES,
                       weights + static_cast<u64>(at) * unit, unit, state.filled());
    }
    DEVICE void fetch_rows(const Params& params) const {
        if (over(params) || threadIdx.x % 32 != 0 || row_bytes == 0) return;
        copy_bulk_kept(state.bytes(), rows + static_cast<i64>(step) * params.rows * SLAB_ROW, row_bytes,
                       state.filled());
    }
};

// A warp's state while it reads the ring.
struct Consumer {
    const Params& params;
    PipelineState state;
    Producer producer;
    int due;       // steps to read before this warp requests one
    u32 unit;      // offset in a stage of the weights of the warp's n-tile
    int side;      // the warp's half of the n-tile
    u32 exponent;  // SCALE_EXPONENT, in a register

    DEVICE void acquire() const { barrier_wait(state.filled(), state.parity); }
    // This lane has read the stage. `last` must depend on every load from it that may be
    // outstanding.
    DEVICE void release(u32 last) {
        barrier_arrive_received(state.read(), last);
        state.next();
    }
    // Called once per step, after the previous step was released. When it is this warp's turn,
    // waits until all threads have released that step, and requests copies into its stage.
    DEVICE void produce() {
        if (due-- > 0) return;
        due = WARPS - 1;
        barrier_wait(producer.state.read(), producer.state.parity ^ 1);
        producer.fetch_weights(params);
        producer.fetch_rows(params);
        producer.advance(params);
    }
};

// Where a lane reads in a stage, and its loads for 16 of K.
template <int KIND> struct Place {
    u32 rows_in, words_in, scales_in;  // offsets in a stage
    saddr rows, words, scales;         // addresses in the stage that was entered

    DEVICE Place(const Consumer& consumer) {
        const u32 lane = threadIdx.x % 32;
        rows_in = kept(lane % 16 * SLAB_ROW + ((lane / 16 ^ (lane & 7)) << 4));
        words_in = kept(consumer.unit + Packed<KIND>::words_at(consumer.side));
        scales_in = kept(consumer.unit + Packed<KIND>::scales_at(consumer.side));
    }
    DEVICE void enter(const PipelineState& state) {
        const saddr at = state.bytes();
        rows = at + rows_in, words = at + words_in, scales = at + scales_in;
    }
    // The 16 rows from row 16 m on. Slabs are swizzled, so that k16 is xored rather than added.
    DEVICE void load(u32 (&a)[4], int k16, int m) const {
        load_matrix4(a, (rows ^ (k16 << 5)) + m * 16 * SLAB_ROW);
    }
    DEVICE void load(Packed<KIND>& packed, int k16) const { packed.load(words, scales, k16); }
};

template <int M> using Sums = float[M][STRIPS][4];  // [16 rows][8 columns][fragment]

// The sums of an item over all of K. Software-pipelined, also across steps: a fragment of 16 rows
// is loaded EARLY fragments ahead of its products, and the weights of the next 16 of K equally far
// ahead of their first product. A stage is released as soon as all its loads have been issued.
template <int KIND, int M>
DEVICE void multiply(Sums<M>& sums, int steps, Consumer& consumer) {
    constexpr int EARLY = 3, ALL = STEP / 16 * M;
    u32 a[EARLY + 1][4];
    StripFragments b[2];
    Packed<KIND> packed;
    Place<KIND> place(consumer);
    consumer.acquire();
    place.enter(consumer.state);
    place.load(packed, 0);
#pragma unroll
    for (int i = 0; i < EARLY; i++) place.load(a[i], i / M, i % M);
    packed.decode(b[0], 0, consumer.exponent);
#pragma unroll 1
    for (int left = steps; left > 0; left--) {
        u32 seen = 0;
#pragma unroll
        for (int i = 0; i < ALL; i++) {
            const int k16 = i / M, m = i % M, then = (i + EARLY) % ALL;
            // The compiler may move products of the last 16 of K past the release, and with them
            // the waits for their loads; so the release depends on these fragments too.
            if (i >= ALL - M - 1 && i < ALL - EARLY) seen ^= a[i % (EARLY + 1)][0];
            if (then == 0) {
                seen ^= packed.last();
#pragma unroll
                for (int e = 0; e < EARLY; e++) seen ^= a[(i + e) % (EARLY + 1)][0];
                consumer.release(seen);
                if (left > 1) {
                    consumer.acquire();
                    place.enter(consumer.state);
                }
            }
            if (i + EARLY < ALL || left > 1) {
                place.load(a[(i + EARLY) % (EARLY + 1)], then / M, then % M);
                if (m == M - EARLY) place.load(packed, (k16 + 1) % 4);
            }
            if (m == M - 1) packed.decode(b[(k16 + 1) % 2], (k16 + 1) % 4, consumer.exponent);
            if (i == ALL / 2) consumer.produce();
#pragma unroll
            for (int j = 0; j < STRIPS; j++) {
                mma_bf16(sums[m][j], a[i % (EARLY + 1)], b[k16 % 2][j][0], b[k16 % 2][j][1]);
            }
        }
    }
}

DEVICE float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// x * Phi(x): exactly, or with (1 + tanh u) / 2 = 1 / (1 + e^(-2 u)). Neither form subtracts, so that
// small results keep their digits.
DEVICE float gelu(float x) {
    if (EPILOGUE == GELU_ERF) return 0.5f * x * erfcf(x * -0.707106781f);
    const float u = 0.797884561f * fma_rn(0.044715f * x * x, x, x);
    return __fdividef(x, 1.0f + __expf(-2.0f * u));
}

struct Finish {
    const float* scales;
    const int2* strips;  // of 8 columns: segment << 24 | column, or -1; width of the segment
    const u16* residual;
    u16* const* outputs;
#if BIAS
    const float* const* biases;
#endif
};

// Where one lane's two columns of a strip are stored, and their scales. With a single segment, `y`
// and `width` are copied from the first strip.
struct Target {
    int column;  // below 0: not stored
    int width;
    u16* y;
    float2 scales, up;
#if BIAS
    float2 bias;
#endif

    DEVICE void find(const Finish& f, int packed, const Target& first) {
        const int2 strip = f.strips[packed / 8];
        column = strip.x < 0 ? -1 : (strip.x & 0xffffff) + packed % 8;
        if (column >= strip.y) column = -1;  // a segment may end inside a strip
        width = EPILOGUE == NONE || this == &first ? strip.y : first.width;
        const int segment = strip.x < 0 ? 0 : strip.x >> 24;
        y = EPILOGUE == NONE || this == &first ? f.outputs[segment] : first.y;
        scales = *reinterpret_cast<const float2*>(f.scales + packed);
        if (EPILOGUE == SWIGLU) up = *reinterpret_cast<const float2*>(f.scales + packed + 8);
#if BIAS
        if (column >= 0) bias = *reinterpret_cast<const float2*>(f.biases[segment] + column);
#endif
    }
    DEVICE i64 at(int row) const { return static_cast<i64>(row) * width + column; }
};

// Loads the residual for a strip: two columns of every eighth row from `row` on.
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

// The epilogue. `column`: first packed column of the warp's half n-tile; `row`: first of its 16 M
// rows. The residual is loaded one strip ahead: the compiler may not move these loads before
// stores.
template <int M>
DEVICE void finish(const Sums<M>& sums, const Params& params, const Finish& f, int column, int row) {
    constexpr int STRIDE = EPILOGUE == SWIGLU ? 2 : 1;
    const int lane = threadIdx.x % 32, pair = lane % 4 * 2;
    row += lane / 4;
    Target targets[STRIPS];
#pragma unroll
    for (int j = 0; j < STRIPS; j += STRIDE) targets[j].find(f, column + j * 8 + pair, targets[0]);
    u32 added[2][2 * M];
    fetch_residual<M>(added[0], targets[0], f.residual, row, params.rows);
#pragma unroll
    for (int j = 0; j < STRIPS; j += STRIDE) {
        const Target& target = targets[j];
        if (j + 1 < STRIPS)
            fetch_residual<M>(added[(j + 1) % 2], targets[j + 1], f.residual, row, params.rows);
        if (target.column < 0) continue;
#pragma unroll
        for (int i = 0; i < 2 * M; i++) {
            if (row + i * 8 >= params.rows) break;
            float low = sums[i / 2][j][i % 2 * 2] * target.scales.x;
            float high = sums[i / 2][j][i % 2 * 2 + 1] * target.scales.y;
#if BIAS
            low += target.bias.x, high += target.bias.y;
#endif
            if (EPILOGUE == GELU_TANH || EPILOGUE == GELU_ERF) low = gelu(low), high = gelu(high);
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

// A warp's part of one item: 16 M rows x half an n-tile of the group.
template <int M>
DEVICE void work(const WorkTile& item, const Params& params, const Finish& f, Consumer& consumer) {
    const int tile = threadIdx.x / 32 / 2, kind = item.group.kind;
    if (tile >= item.group.tiles) {  // nothing to multiply, but this warp's copies must be issued
        for (int step = 0; step < params.steps; step++) {
            consumer.acquire();
            consumer.produce();
            consumer.release(0);
        }
        return;
    }
    Sums<M> sums = {};
    if ((KINDS & 1 << NVFP4) && kind == NVFP4) multiply<NVFP4, M>(sums, params.steps, consumer);
    if ((KINDS & 1 << NARROW) && kind == NARROW) multiply<NARROW, M>(sums, params.steps, consumer);
    if ((KINDS & 1 << FP8) && kind == FP8) multiply<FP8, M>(sums, params.steps, consumer);
    if ((KINDS & 1 << BF16) && kind == BF16) multiply<BF16, M>(sums, params.steps, consumer);
    finish<M>(sums, params, f, item.group.column + tile * TILE_COLUMNS + consumer.side * HALF_TILE,
              item.row);
}

KERNEL void __launch_bounds__(THREADS, 1)
linear_prefill(const u8* slabs, const u8* __restrict__ weights, const float* __restrict__ scales,
               const int4* __restrict__ groups, const int2* __restrict__ strips,
               const u16* residual, u16* const* __restrict__ outputs, int rows, int width,
               int group_count, int whole
#if BIAS
               , const float* const* __restrict__ biases
#endif
) {
    DYNAMIC_SHARED(shared);
    const int warp = threadIdx.x / 32;
    const saddr stages = shared_address(shared), full = stages + STAGES * STAGE_BYTES;
    const int row_tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    const Params params = {slabs,     weights, groups, rows,
                       row_tiles, (width + STEP - 1) / STEP,
                       whole,     2 * row_tiles * group_count - whole};
#if BIAS
    const Finish f = {scales, strips, residual, outputs, biases};
#else
    const Finish f = {scales, strips, residual, outputs};
#endif
    const PipelineState state = {stages, full, full + 8 * STAGES, 0, 0};
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(state.full + 8 * i, 1);
            barrier_init(state.empty + 8 * i, THREADS);
        }
        barrier_init_done();
    }
    sync_block();

    Consumer consumer = {params,
                     state,
                     {state, static_cast<int>(blockIdx.x), warp},
                     (warp + WARPS - AHEAD) % WARPS,
                     static_cast<u32>(ROWS_BYTES + warp / 2 * UNIT_BYTES),
                     warp % 2,
                     kept(opaque(SCALE_EXPONENT))};
    consumer.producer.start(params);
    consumer.producer.state.next(warp);
    consumer.producer.settle(params);
    // Weights are constant and may be read early; the rows are written by the previous kernel.
    if (warp < AHEAD) consumer.producer.fetch_weights(params);
    let_next_start();
    wait_for_previous();
    if (warp < AHEAD) {
        consumer.producer.fetch_rows(params);
        consumer.producer.advance(params);
    }
#pragma unroll 1
    for (int index = blockIdx.x; index < params.items; index += gridDim.x) {
        const WorkTile item = item_of(params, index);
        if (TILE_ROWS == 64 || item.height < TILE_ROWS)
            work<4>(item, params, f, consumer);
        else
            work<TILE_ROWS / 16>(item, params, f, consumer);
    }
}
