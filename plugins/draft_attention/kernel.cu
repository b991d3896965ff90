// draft_attention in one launch. A thread block computes 32 rows of one key/value head (two query
// heads of 16 rows, or one of up to 32) over one stretch of the context; its eight warps are 2 row
// tiles x 4 groups of 16 positions. For each set of rows, the last block to finish merges the
// stretches in order. The call's own keys and values belong to the last stretch.
//
// Only the call's own rows come from the previous kernel: the rings, their length and the bounds of
// what is seen were written in an earlier step and are read before the wait. The next kernel may
// start when a block has requested its last tile; earlier, loads of its weights would delay that.
#include "draft_attention/rotary.cuh"
#include "draft_attention/kv_tile.cuh"
#include "linear/activation_slabs.cuh"

// The part of the context that a block works on.
struct Stretch {
    int at, end;   // context positions; `end` is that of the whole context
    int tiles;
    int count;     // stretches that have work
    bool own;      // whether this one includes the call's own keys
};

DEVICE Stretch stretch_of(int length, int window, int first, int slots) {
    int low = first > 0 ? first : 0;
    if (low < length - slots) low = length - slots;
    if (window > 0 && low < length - window + 1) low = length - window + 1;
    int tiles = low < length ? (length - low + TILE - 1) / TILE : 0;
    int splits = static_cast<int>(gridDim.x), me = static_cast<int>(blockIdx.x);
    Stretch s;
    s.end = length;
    s.count = tiles < splits ? (tiles > 0 ? tiles : 1) : splits;
    // 32 bits are enough for a few thousand tiles times STRETCHES; a 64-bit division is much
    // slower.
    int begin = tiles * me / s.count;
    s.tiles = tiles * (me + 1) / s.count - begin;
    s.at = low + begin * TILE;
    s.own = me == s.count - 1;
    return s;
}

// Starts copying one tile of keys and values from position `at` on. Positions from `end` on are
// zeroed, since the ring may hold NaN there, and NaN times a zero weight is NaN.
DEVICE void fetch(saddr stage, const u16* keys, const u16* values, int at, int end, int slots) {
    int base = at % slots;
#pragma unroll
    for (int i = 0; i < (TILE * D / 8 + THREADS - 1) / THREADS; i++) {
        int item = i * THREADS + static_cast<int>(threadIdx.x);
        int row = item / (D / 8), chunk = item % (D / 8);
        if (row >= TILE) break;
        bool valid = at + row < end;
        int slot = base + row;
        if (slot >= slots) slot -= slots;
        if (!valid) slot = 0;
        u64 from = static_cast<u64>(slot) * D + chunk * 8;
        saddr to = stage + place(row, chunk);
        copy_async16(to, keys + from, valid);
        copy_async16(to + VALUES, values + from, valid);
    }
}

// Stores a head; zeros if it does not exist.
DEVICE void put_head(u8* tile, int row, const Head<D>& h, bool there) {
#pragma unroll
    for (int i = 0; i < Head<D>::UNITS; i++) {
        int u = unit_of<D>(i);
        if (u >= D / 4) break;
        int low = low_of<D>(u), high = high_of<D>(u);
        *reinterpret_cast<u32*>(tile + place(row, low / 8) + low % 8 * 2) =
            there ? pack_bf16x2(h.x[i][0], h.x[i][1]) : 0;
        *reinterpret_cast<u32*>(tile + place(row, high / 8) + high % 8 * 2) =
            there ? pack_bf16x2(h.x[i][2], h.x[i][3]) : 0;
    }
}

// The call's rows, and this block's part of them.
struct Rows {
    int count;      // T
    int padded;     // rows of one query head in a block: 16 or 32
    int head;       // first query head of this block
    int heads;      // query heads of this block that exist
    int kv;
    int length;
    float eps;
    u64 q_pitch, kv_pitch;

    // For a row of the block: which of the block's query heads, and which row of the call.
    DEVICE int head_of(int row) const { return padded == ROWS ? 0 : row / (ROWS / 2); }
    DEVICE int row_of(int row) const { return row - head_of(row) * padded; }
};

constexpr int EACH = ROWS / WARPS;  // query rows that a warp prepares

// What a warp needs to prepare its rows, besides the rows themselves; loaded before the wait.
struct Constants {
    Head<D> q_norm, k_norm;
    Rotation<D> turns[EACH];
};

// A warp's i-th row among the block's: head `h` of its query heads, row `t` of the call.
struct Spot {
    int h, t;

    DEVICE Spot(const Rows& r, int i) {
        const int row = static_cast<int>(threadIdx.x) / 32 + i * WARPS;
        h = r.head_of(row);
        t = r.row_of(row);
    }
};

// Writes the normed and rotated queries to `tile`; with `stage`, also the call's own keys and
// values. All loads are issued before any result is used; indices of rows that do not exist are
// clamped.
DEVICE void put_rows(u8* tile, u8* stage, const Rows& r, const Constants& constants,
                     const u16* q, const u16* k, const u16* v) {
    Packed<D> queries[EACH], keys[EACH], values[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const Spot at(r, i);
        const int t = min(at.t, r.count - 1), h = r.head + min(at.h, r.heads - 1);
        queries[i] = load_packed<D>(q + t * r.q_pitch + h * D);
    }
    if (stage) {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const u64 from = min(Spot(r, i).t, r.count - 1) * r.kv_pitch + r.kv * D;
            keys[i] = load_packed<D>(k + from);
            values[i] = load_packed<D>(v + from);
        }
    }
    Head<D> x[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) x[i] = unpacked<D>(queries[i]);
    norm_and_rotate(x, constants.q_norm, constants.turns, r.eps);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const Spot at(r, i);
        put_head(tile, at.h * r.padded + at.t, x[i], at.t < r.count && at.h < r.heads);
    }
    if (!stage) return;
#pragma unroll
    for (int i = 0; i < EACH; i++) x[i] = unpacked<D>(keys[i]);
    norm_and_rotate(x, constants.k_norm, constants.turns, r.eps);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const Spot at(r, i);
        if (at.h > 0) break;  // rows repeat for the second head; keys are stored once
        put_head(stage, at.t, x[i], at.t < r.count);
        put_head(stage + VALUES, at.t, unpacked<D>(values[i]), at.t < r.count);
    }
}

// Writes the four groups' sums of weighted values to `merged` [GROUPS][ROWS][PITCH], relative to a
// common maximum for each row, and that maximum and the sum of all weights to `facts` [ROWS].
DEVICE void merge_groups(State& state, float* merged, float2* parts, float2* facts, int row0,
                         int group) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        state.sum[half] += shuffle_xor(state.sum[half], 1);
        state.sum[half] += shuffle_xor(state.sum[half], 2);
        if (lane % 4 == 0)
            parts[group * ROWS + row0 + lane / 4 + 8 * half] =
                make_float2(state.most[half], state.sum[half]);
    }
    sync_block();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = row0 + lane / 4 + 8 * half;
        float most = NOTHING, sum = 0.0f;
        for (int i = 0; i < GROUPS; i++) most = fmaxf(most, parts[i * ROWS + row].x);
        for (int i = 0; i < GROUPS; i++)
            sum += parts[i * ROWS + row].y * exp2f(parts[i * ROWS + row].x - most);
        if (group == 0 && lane % 4 == 0) facts[row] = make_float2(most, sum);
        float shrink = exp2f(state.most[half] - most);
        float* to = merged + (group * ROWS + row) * PITCH + 2 * (lane % 4);
#pragma unroll
        for (int d = 0; d < D / 8; d++)
            *reinterpret_cast<float2*>(to + 8 * d) =
                make_float2(state.o[d][2 * half] * shrink, state.o[d][2 * half + 1] * shrink);
    }
    sync_block();
}

DEVICE Rows rows_of(int count, int heads, int kv_heads, int length, float eps) {
    Rows r;
    r.count = count;
    r.padded = count <= 16 ? 16 : 32;
    int each = heads / kv_heads, here = ROWS / r.padded, blocks = (each + here - 1) / here;
    int offset = static_cast<int>(blockIdx.y) % blocks * here;
    r.kv = static_cast<int>(blockIdx.y) / blocks;
    r.head = r.kv * each + offset;
    r.heads = each - offset < here ? each - offset : here;
    r.length = length;
    r.eps = eps;
    r.q_pitch = static_cast<u64>(heads) * D;
    r.kv_pitch = static_cast<u64>(kv_heads) * D;
    return r;
}

DEVICE float4 group_sum(const float* merged, int row, int column) {
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < GROUPS; i++) {
        const float4 x =
            *reinterpret_cast<const float4*>(merged + (i * ROWS + row) * PITCH + column);
        sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
    }
    return sum;
}

DEVICE uint2 packed4(float4 x, float by) {
    return make_uint2(pack_bf16x2(x.x * by, x.y * by), pack_bf16x2(x.z * by, x.w * by));
}

// The destination of the result: `o`, and, if not null, `slabs` in the form the next product reads.
struct Output {
    u16 *o, *slabs;

    // Stores 4 or 8 neighbouring columns that lie within one eighth of a slab's row.
    template <class Packed> DEVICE void put(const Rows& r, int row, int column, Packed x) const {
        int h = r.head_of(row), t = r.row_of(row), k = (r.head + h) * D + column;
        if (t >= r.count || h >= r.heads) return;
        *reinterpret_cast<Packed*>(o + t * r.q_pitch + k) = x;
        if (slabs) *reinterpret_cast<Packed*>(slabs + slab_offset(r.count, t, k) + k % 8) = x;
    }
};

// Stores the block's result, bf16: rows of the output if there is only one stretch, else the part
// to be merged. No row's sum of weights is zero: the last stretch has the call's own keys, and all
// others consist of whole tiles, of which a window hides fewer than ROWS positions from a row.
static_assert(ROWS < TILE, "a row sees something of every tile");
DEVICE void leave(const Output& to, const Rows& r, const float* merged, const float2* mine,
                  u16* means, float2* facts, bool alone) {
#pragma unroll 1
    for (int item = threadIdx.x; item < ROWS * D / 4; item += THREADS) {
        int row = item / (D / 4), column = item % (D / 4) * 4;
        const uint2 mean = packed4(group_sum(merged, row, column), 1.0f / mine[row].y);
        if (alone)
            to.put(r, row, column, mean);
        else
            *reinterpret_cast<uint2*>(means + row * D + column) = mean;
    }
    if (!alone && threadIdx.x < ROWS) facts[threadIdx.x] = mine[threadIdx.x];
}

DEVICE void add8(float (&sum)[8], uint4 x, float weight) {
    const u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sum[2 * i] = fma_rn(bf16x2_low(words[i]), weight, sum[2 * i]);
        sum[2 * i + 1] = fma_rn(bf16x2_high(words[i]), weight, sum[2 * i + 1]);
    }
}

constexpr int MERGED = ROWS * D / 8;  // results of eight columns of a row
constexpr int TURNS = (MERGED + THREADS - 1) / THREADS, AT_ONCE = TURNS < 2 ? TURNS : 2;
typedef uint4 Parts[AT_ONCE][STRETCHES];

DEVICE int result_of(int turn) { return turn * THREADS + static_cast<int>(threadIdx.x); }

// Loads the stretches' parts of this thread's results from number `turn` on.
DEVICE void load_parts(Parts& parts, const u16* means, int turn, int count) {
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++) {
        const int result = result_of(turn + n);
#pragma unroll
        for (int i = 0; i < STRETCHES; i++) {
            const uint4* const from = reinterpret_cast<const uint4*>(means + i * ROWS * D);
            if (i < count && result < MERGED) parts[n][i] = load_shared_result(from + result);
        }
    }
}

// Computes the weight of each stretch in a row. Called by one thread per row.
DEVICE void weigh_stretches(float (*weights)[ROWS], const float2* facts, int count) {
    float most = NOTHING, sum = 0.0f, weight[STRETCHES];
    float2 all[STRETCHES];
#pragma unroll
    for (int i = 0; i < STRETCHES; i++) {
        const float* at = reinterpret_cast<const float*>(facts + i * ROWS + threadIdx.x);
        all[i] = i < count ? make_float2(load_shared_result(at), load_shared_result(at + 1))
                           : make_float2(NOTHING, 0.0f);
        most = fmaxf(most, all[i].x);
    }
#pragma unroll
    for (int i = 0; i < STRETCHES; i++) {
        weight[i] = all[i].y * exp2f(all[i].x - most);
        sum += weight[i];
    }
    const float by = 1.0f / sum;
#pragma unroll
    for (int i = 0; i < STRETCHES; i++) weights[i][threadIdx.x] = weight[i] * by;
}

// Adds the parts of the stretches in order. They are loading while their weights are computed.
DEVICE void merge_stretches(const Output& to, const Rows& r, const u16* means, const float2* facts,
                            float (*weights)[ROWS], int count) {
    Parts parts;
    load_parts(parts, means, 0, count);
    if (threadIdx.x < ROWS) weigh_stretches(weights, facts, count);
    sync_block();
#pragma unroll 1
    for (int turn = 0; turn < TURNS; turn += AT_ONCE) {
        if (turn > 0) load_parts(parts, means, turn, count);
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            const int result = result_of(turn + n);
            if (result >= MERGED) break;
            const int row = result / (D / 8), column = result % (D / 8) * 8;
            float sum[8] = {};
#pragma unroll
            for (int i = 0; i < STRETCHES; i++)
                if (i < count) add8(sum, parts[n][i], weights[i][row]);
            to.put(r, row, column,
                   make_uint4(pack_bf16x2(sum[0], sum[1]), pack_bf16x2(sum[2], sum[3]),
                              pack_bf16x2(sum[4], sum[5]), pack_bf16x2(sum[6], sum[7])));
        }
    }
}

KERNEL void __launch_bounds__(THREADS, D <= 128 ? 2 : 1)
draft_attention(const u16* q, const u16* k, const u16* v, const void* q_norm, const void* k_norm,
                const i32* length, const i32* window, const i32* first, const u16* ring_k,
                const u16* ring_v, u16* o, u16* slabs, const float* frequency, u16* means,
                float2* facts, u32* arrived, int rows, int heads, int kv_heads, int slots,
                int causal, float eps) {
    DYNAMIC_SHARED(memory);
    __shared__ float2 parts[GROUPS * ROWS];
    __shared__ float2 mine[ROWS];
    __shared__ float weights[STRETCHES][ROWS];
    __shared__ Rows kept;  // used after the loop; the loop itself needs every register
    __shared__ u32 order;
    u8* q_tile = memory;
    u8* stages = memory + ROWS * ROW_BYTES;

    Rows r = rows_of(rows, heads, kv_heads, *length, eps);
    int near = *window;
    Stretch s = stretch_of(r.length, near, *first, slots);
    if (static_cast<int>(blockIdx.x) >= s.count) return;

    const u16* keys = ring_k + static_cast<u64>(r.kv) * slots * D;
    const u16* values = ring_v + static_cast<u64>(r.kv) * slots * D;
    saddr ring = shared_address(stages), queries = shared_address(q_tile);
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        if (i < s.tiles)
            fetch(ring + i * STAGE_BYTES, keys, values, s.at + i * TILE, s.end, slots);
        copy_async_commit();
    }
    Constants constants;
    constants.q_norm = load_weight<D>(q_norm, NORM_F32);
    constants.k_norm = load_weight<D>(k_norm, NORM_F32);
    const Frequencies<D> frequencies = load_frequencies<D>(frequency);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const bool again = i >= EACH / 2 && r.padded < ROWS;  // second head: the same rows again
        constants.turns[i] = again ? constants.turns[i - EACH / 2]
                                   : rotation_at<D>(frequencies, r.length + Spot(r, i).t);
    }
    if (s.tiles < STAGES) let_next_start();
    wait_for_previous();
    // The last stage is still free and holds the call's own keys first.
    u8* own = stages + (STAGES - 1) * STAGE_BYTES;
    put_rows(q_tile, s.own ? own : nullptr, r, constants, q, k, v);
    if (threadIdx.x == 0) kept = r;
    sync_block();

    int warp = threadIdx.x / 32, row0 = warp / GROUPS * 16, group = warp % GROUPS;
    int row = r.row_of(row0) + static_cast<int>(threadIdx.x % 32) / 4;
    State state = {};
    state.most[0] = state.most[1] = NOTHING;
    View view;
    view.query = r.length + row;
    view.most = (near > 0 ? near : r.length + rows) - 1;  // without a window, all there is
    view.least = causal ? 0 : -view.most;
    if (s.own && group * 16 < r.padded) {
        view.key = r.length + group * 16;
        view.end = r.length + rows;
        attend(state, queries, shared_address(own), row0, group * 16, view);
    }
    view.end = s.end;
    for (int i = 0; i < s.tiles; i++) {
        int ahead = i + STAGES - 1;
        copy_async_wait<STAGES - 2>();
        received(last_of(state));
        sync_block();
        if (ahead < s.tiles)
            fetch(ring + ahead % STAGES * STAGE_BYTES, keys, values, s.at + ahead * TILE, s.end,
                  slots);
        copy_async_commit();
        if (ahead == s.tiles - 1) let_next_start();
        view.key = s.at + i * TILE + group * 16;
        attend(state, queries, ring + i % STAGES * STAGE_BYTES, row0, group * 16, view);
    }
    sync_block();

    float* merged = reinterpret_cast<float*>(stages);
    merge_groups(state, merged, parts, mine, row0, group);
    u64 stretch = static_cast<u64>(blockIdx.y) * gridDim.x + blockIdx.x;
    const Output to = {o, slabs};
    leave(to, kept, merged, mine, means + stretch * ROWS * D, facts + stretch * ROWS, s.count == 1);
    if (s.count == 1) return;
    sync_block();
    if (threadIdx.x == 0) order = arrive(arrived + blockIdx.y);
    sync_block();
    if (order != static_cast<u32>(s.count - 1)) return;
    fence_device();
    stretch -= blockIdx.x;
    merge_stretches(to, kept, means + stretch * ROWS * D, facts + stretch * ROWS, weights, s.count);
    if (threadIdx.x == 0) arrived[blockIdx.y] = 0;
}
