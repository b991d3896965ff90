// sample: draws an id for each row of logits.
// Grid: one cluster of BLOCKS blocks x rows. The threads of a cluster hold a whole row in registers,
// HELD logits each, in groups of four neighbours;
// top-k and top-p find the last rank to keep by bisection over the order of float32 numbers, so the
// result does not depend on the order of sums or on how a row is cut.
#include "cuda/noise.cuh"

constexpr int WARPS = THREADS / 32;
constexpr float WEIGHT_SCALE = 2147483648.0f;
constexpr float LOWEST = -3.402823466e38f;
constexpr int NO_ID = 0x7fffffff;

DEVICE float minus_infinity() { return bits_float(0xff800000u); }

// Unsigned numbers in the order of floats that are not NaN; -0 is made +0 before.
DEVICE u32 order_of(float x) {
    const u32 bits = float_bits(x);
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}
DEVICE float of_order(u32 order) {
    return bits_float(order ^ (order >> 31 ? 0x80000000u : 0xffffffffu));
}

// ---- reductions over the cluster ---------------------------------------------------------------

DEVICE u64 joined(u32 low, u32 high) { return static_cast<u64>(high) << 32 | low; }

// Each combines 16 bytes, in any order, and has an element that changes nothing.
struct Greatest {  // order of a float, flags
    static DEVICE uint4 none() { return make_uint4(0, 0, 0, 0); }
    static DEVICE uint4 of(uint4 a, uint4 b) {
        return make_uint4(a.x > b.x ? a.x : b.x, a.y | b.y, 0, 0);
    }
};
struct Sum {  // a count, a 64-bit amount: low word, high word
    static DEVICE uint4 none() { return make_uint4(0, 0, 0, 0); }
    static DEVICE uint4 of(uint4 a, uint4 b) {
        const u64 amount = joined(a.y, a.z) + joined(b.y, b.z);
        return make_uint4(a.x + b.x, static_cast<u32>(amount), static_cast<u32>(amount >> 32), 0);
    }
};
struct Draw {  // the drawn score's order, its id; the lowest rank's order, its stored row
    static DEVICE uint4 none() { return make_uint4(0, NO_ID, 0xffffffffu, 0); }
    static DEVICE uint4 of(uint4 a, uint4 b) {
        const bool score = b.x > a.x || (b.x == a.x && b.y < a.y);
        const bool rank = b.z < a.z || (b.z == a.z && b.w > a.w);
        return make_uint4(score ? b.x : a.x, score ? b.y : a.y, rank ? b.z : a.z, rank ? b.w : a.w);
    }
};

template <class Combine> DEVICE uint4 over_warp(uint4 v) {
#pragma unroll
    for (int mask = 16; mask; mask /= 2)
        v = Combine::of(v, make_uint4(shuffle_xor(v.x, mask), shuffle_xor(v.y, mask),
                                      shuffle_xor(v.z, mask), shuffle_xor(v.w, mask)));
    return v;
}

// A row, its cluster's memory for reductions, and what else the steps share.
struct Row {
    uint4 (*partial)[WARPS + 1];  // [2]: of each warp, then of the block; reductions alternate
    float* copy;                  // [HELD, THREADS]: logits for loops that are not unrolled, or
                                  // the bits of weights
    int turn;
    int vocab;
};

// Stored row of this thread's i-th logit.
DEVICE int row_of(int i) {
    const int quad = i / 4 * BLOCKS * THREADS + static_cast<int>(cluster_rank()) * THREADS +
                     static_cast<int>(threadIdx.x);
    return quad * 4 + i % 4;
}

template <class Combine> DEVICE uint4 over_cluster(Row& row, uint4 mine) {
    uint4* const partial = row.partial[row.turn];
    row.turn ^= 1;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    mine = over_warp<Combine>(mine);
    if (lane == 0) partial[warp] = mine;
    sync_block();
    if (warp == 0) {
        const uint4 of_block = over_warp<Combine>(lane < WARPS ? partial[lane] : Combine::none());
        if (lane == 0) partial[WARPS] = of_block;
    }
    // A partial is overwritten two reductions later: the barrier of the next one is in between.
    cluster_arrive();
    cluster_wait();
    uint4 found = Combine::none();
    if (lane < BLOCKS) {
        const float4 v = load_cluster16(cluster_address(shared_address(partial + WARPS), lane));
        found = make_uint4(float_bits(v.x), float_bits(v.y), float_bits(v.z), float_bits(v.w));
    }
    return over_warp<Combine>(found);
}

// ---- ranks -------------------------------------------------------------------------------------

struct Total {
    u32 count;
    u64 amount;
};

DEVICE Total total_of(Row& row, u32 count, u64 amount) {
    const uint4 sum = over_cluster<Sum>(
        row, make_uint4(count, static_cast<u32>(amount), static_cast<u32>(amount >> 32), 0));
    return {sum.x, joined(sum.y, sum.z)};
}

// Of the logits that are at least `from`: their number, and the sum of their weights, or the number
// again. Dropped logits are minus infinity.
DEVICE Total total_from(Row& row, const float (&x)[HELD], bool weighted, float from) {
    u32 count = 0;
    u64 amount = 0;
    if (weighted) {
#pragma unroll
        for (int i = 0; i < HELD; ++i)
            if (x[i] >= from) ++count, amount += float_bits(row.copy[i * THREADS + threadIdx.x]);
    } else {
#pragma unroll
        for (int i = 0; i < HELD; ++i) count += x[i] >= from;
        amount = count;
    }
    return total_of(row, count, amount);
}

// Among the logits equal to `value`, drops all but the first `count` by stored row.
DEVICE void keep_equals(Row& row, float (&x)[HELD], float value, u64 count) {
    int low = -1, high = row.vocab - 1;
    while (high - low > 1) {
        const int middle = low + (high - low) / 2;
        u32 before = 0;
#pragma unroll
        for (int i = 0; i < HELD; ++i) before += x[i] == value && row_of(i) <= middle;
        if (total_of(row, before, 0).count >= count)
            high = middle;
        else
            low = middle;
    }
#pragma unroll
    for (int i = 0; i < HELD; ++i)
        if (x[i] == value && row_of(i) > high) x[i] = minus_infinity();
}

// Drops all but the shortest prefix of ranks whose amounts sum to at least `goal`, at least 1 and
// at most the sum `all` of all that are left.
DEVICE void keep_prefix(Row& row, float (&x)[HELD], bool weighted, u64 goal, Total all,
                        float largest) {
    u32 low = order_of(LOWEST), high = order_of(largest) + 1;
    Total below = all, above{0, 0};  // of the logits from low on, from high on
    while (high - low > 1 && below.count - above.count > 1) {
        const u32 middle = low + (high - low) / 2;
        const Total found = total_from(row, x, weighted, of_order(middle));
        if (found.amount >= goal)
            low = middle, below = found;
        else
            high = middle, above = found;
    }
    const float from = of_order(low);
#pragma unroll
    for (int i = 0; i < HELD; ++i)
        if (x[i] < from) x[i] = minus_infinity();
    const u32 equal = below.count - above.count;
    if (equal < 2) return;
    const u64 each = (below.amount - above.amount) / equal;
    const u64 wanted = (goal - above.amount + each - 1) / each;
    if (wanted < equal) keep_equals(row, x, from, wanted);
}

// ---- the steps ---------------------------------------------------------------------------------

struct Call {
    const float* logits;
    const i32* id_map;
    const u32* mask;
    i32 width, vocab, words, first;
};

// Loads this thread's logits of a row: minus infinity where the mask forbids the id and from vocab
// on. Returns whether one below vocab is NaN or positive infinity.
DEVICE bool load(const Call& c, int row, float (&x)[HELD]) {
    const float* const from = c.logits + static_cast<i64>(row) * c.width;
    const bool wide = c.width % 4 == 0;
    bool fault = false;
#pragma unroll
    for (int i = 0; i < HELD; i += 4) {
        const int at = row_of(i);
        x[i] = x[i + 1] = x[i + 2] = x[i + 3] = minus_infinity();
        if (wide && at < c.vocab) {
            const float4 four = *reinterpret_cast<const float4*>(from + at);
            x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
        }
        u32 allowed = 0xf;
        if (c.mask && at < c.vocab) allowed = c.mask[row * c.words + at / 32] >> (at % 32);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (!wide && at + j < c.vocab) x[i + j] = from[at + j];
            if (at + j >= c.vocab) x[i + j] = minus_infinity();
            fault = fault || !(x[i + j] < -minus_infinity());
            x[i + j] = allowed >> j & 1 ? add_rn(x[i + j], 0.0f) : minus_infinity();
        }
    }
    return fault;
}

struct Scale {
    float largest, inverse;
    DEVICE float operator()(float x) const { return mul_rn(add_rn(x, -largest), inverse); }
};

// Copies this thread's logits to memory that it alone uses: loops over registers must be unrolled,
// and long unrolled code would wait for instructions.
DEVICE void copy_logits(const Row& row, const float (&x)[HELD]) {
#pragma unroll
    for (int i = 0; i < HELD; ++i) row.copy[i * THREADS + threadIdx.x] = x[i];
}

// Draws among the copied logits that are left.
DEVICE uint4 draw(const Call& c, const Row& row, Scale z, Seed seed, int position) {
    uint4 best = Draw::none();
#pragma unroll 1
    for (int i = 0; i < HELD; i += 4) {
        const float* const x = row.copy + i * THREADS + threadIdx.x;
        const float four[4] = {x[0], x[THREADS], x[2 * THREADS], x[3 * THREADS]};
        const int at = row_of(i);
        uint4 words = make_uint4(0, 0, 0, 0);
        if (four[0] >= LOWEST || four[1] >= LOWEST || four[2] >= LOWEST || four[3] >= LOWEST)
            words = noise_words(seed, position, at / 4);
        else
            continue;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (!(four[j] >= LOWEST)) continue;
            int id = at + j, lane = j;
            if (MAPPED) {
                id = c.id_map[id], lane = id % 4;
                words = noise_words(seed, position, id / 4);
            }
            const u32 word = lane & 2 ? (lane & 1 ? words.w : words.z)
                                      : (lane & 1 ? words.y : words.x);
            const float score = add_rn(add_rn(z(four[j]), gumbel(word)), 0.0f);
            best = Draw::of(best, make_uint4(order_of(score), id, order_of(four[j]), at + j));
        }
    }
    return best;
}

// Drops what top-k, top-p and min-p exclude.
DEVICE void truncate(Row& row, float (&x)[HELD], Scale z, int top_k, float top_p,
                     float min_log_p) {
    if (top_k > 0) {
        const Total all = total_from(row, x, false, LOWEST);
        if (all.count > static_cast<u32>(top_k)) keep_prefix(row, x, false, top_k, all, z.largest);
    }
    if (top_p < 1.0f) {
        copy_logits(row, x);
#pragma unroll 4
        for (int i = threadIdx.x; i < HELD * THREADS; i += THREADS)
            row.copy[i] = bits_float(
                static_cast<u32>(rintf(mul_rn(exp_rn(z(row.copy[i])), WEIGHT_SCALE))));
        const Total all = total_from(row, x, true, LOWEST);
        const double goal = ceil(static_cast<double>(top_p) * static_cast<double>(all.amount));
        keep_prefix(row, x, true, goal > 1 ? static_cast<u64>(goal) : 1, all, z.largest);
    }
    if (min_log_p >= LOWEST) {
#pragma unroll
        for (int i = 0; i < HELD; ++i)
            if (z(x[i]) < min_log_p) x[i] = minus_infinity();
    }
}

KERNEL void CLUSTERS_OF(BLOCKS) __launch_bounds__(THREADS, 1)
sample_rows(const float* logits, const i32* id_map, const u32* mask, const i32* length,
            const u32* seed, const float* temperature, const i32* top_k, const float* top_p,
            const float* min_log_p, i32* choice, i32* last, i32 width, i32 vocab, i32 words, i32 first) {
    __shared__ uint4 partial[2][WARPS + 1];
    DYNAMIC_SHARED(memory);
    let_next_start();
    wait_for_previous();
    const Call c{logits, id_map, mask, width, vocab, words, first};
    Row row{partial, reinterpret_cast<float*>(memory), 0, vocab};
    const int at = blockIdx.y;

    float x[HELD];
    const bool fault = load(c, at, x);
    float mine = minus_infinity();
#pragma unroll
    for (int i = 0; i < HELD; ++i) mine = x[i] > mine ? x[i] : mine;
    const uint4 top = over_cluster<Greatest>(row, make_uint4(order_of(mine), fault, 0, 0));
    const Scale z{of_order(top.x), 1.0f / *temperature};
    uint4 drawn = Draw::none();
    const bool usable = !top.y && z.largest >= LOWEST;
    if (usable) {
#pragma unroll
        for (int i = 0; i < HELD; ++i)
            if (!(z(x[i]) >= LOWEST)) x[i] = minus_infinity();
        truncate(row, x, z, *top_k, *top_p, *min_log_p);
        copy_logits(row, x);
        drawn = draw(c, row, z, {seed[0], seed[1]}, *length + first + at);
    }
    drawn = over_cluster<Draw>(row, drawn);
    cluster_arrive();  // no block ends while another reads its partial results
    cluster_wait();
    if (cluster_rank() == 0 && threadIdx.x == 0) {
        choice[at] = usable ? static_cast<i32>(drawn.y) : -1;
        if (last) last[at] = usable ? static_cast<i32>(drawn.w) : -1;
    }
}
