// sample: draws an id for each row of logits.
// Grid: one cluster of BLOCKS blocks x rows. A cluster holds a whole row in its shared memory, PART
// logits in each block; top-k and top-p find the last rank to keep by bisection over the order of
// float32 numbers. Counts and weights are integers, so the result does not depend on the order of
// sums or on how a row is cut.
//
// Compile-time: THREADS, PART, BLOCKS, MAPPED; CANDIDATES, at most 32: for rejection.
#include "cuda/noise.cuh"

constexpr int WARPS = THREADS / 32;
constexpr float WEIGHT_SCALE = 2147483648.0f;
constexpr float LOWEST = -3.402823466e38f;
constexpr int NO_ID = 0x7fffffff;
constexpr u32 NEAR = 1 << 24;  // in the order of floats: down to a quarter of a positive number

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

// Each combines up to four words, in any order, and has an element that changes nothing.
struct Greatest {  // order of a float, flags
    static constexpr int WORDS = 2;
    static DEVICE uint4 none() { return make_uint4(0, 0, 0, 0); }
    static DEVICE uint4 of(uint4 a, uint4 b) {
        return make_uint4(a.x > b.x ? a.x : b.x, a.y | b.y, 0, 0);
    }
};
struct Sum {  // a count, a 64-bit amount: low word, high word
    static constexpr int WORDS = 3;
    static DEVICE uint4 none() { return make_uint4(0, 0, 0, 0); }
    static DEVICE uint4 of(uint4 a, uint4 b) {
        const u64 amount = joined(a.y, a.z) + joined(b.y, b.z);
        return make_uint4(a.x + b.x, static_cast<u32>(amount), static_cast<u32>(amount >> 32), 0);
    }
};
struct Draw {  // the drawn score's order, its id; the lowest rank's order, its stored row
    static constexpr int WORDS = 4;
    static DEVICE uint4 none() { return make_uint4(0, NO_ID, 0xffffffffu, 0); }
    static DEVICE uint4 of(uint4 a, uint4 b) {
        const bool score = b.x > a.x || (b.x == a.x && b.y < a.y);
        const bool rank = b.z < a.z || (b.z == a.z && b.w > a.w);
        return make_uint4(score ? b.x : a.x, score ? b.y : a.y, rank ? b.z : a.z, rank ? b.w : a.w);
    }
};

#if CANDIDATES
struct Amounts {  // two 64-bit amounts, low words first
    static constexpr int WORDS = 4;
    static DEVICE uint4 none() { return make_uint4(0, 0, 0, 0); }
    static DEVICE uint4 of(u64 x, u64 y) {
        return make_uint4(static_cast<u32>(x), static_cast<u32>(x >> 32), static_cast<u32>(y),
                          static_cast<u32>(y >> 32));
    }
    static DEVICE uint4 of(uint4 a, uint4 b) {
        return of(joined(a.x, a.y) + joined(b.x, b.y), joined(a.z, a.w) + joined(b.z, b.w));
    }
};
#endif

template <class Combine> DEVICE uint4 over_warp(uint4 v) {
#pragma unroll
    for (int mask = 16; mask; mask /= 2) {
        uint4 other = Combine::none();
        other.x = shuffle_xor(v.x, mask), other.y = shuffle_xor(v.y, mask);
        if (Combine::WORDS > 2) other.z = shuffle_xor(v.z, mask);
        if (Combine::WORDS > 3) other.w = shuffle_xor(v.w, mask);
        v = Combine::of(v, other);
    }
    return v;
}

// A row as one thread sees it.
struct Row {
    uint4 (*partial)[WARPS];  // [2]: of each warp; reductions alternate
    float4* x;                // [PART / 4]: the block's logits, minus infinity where dropped
    int begin, vocab;         // stored row of the first of them; where rows end
    int from, to;             // the thread's groups of four that may hold more than dropped logits
    int turn;
};

template <class Combine> DEVICE uint4 over_cluster(Row& row, uint4 mine) {
    uint4* const partial = row.partial[row.turn];
    row.turn ^= 1;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    mine = over_warp<Combine>(mine);
    if (lane == 0) partial[warp] = mine;
    // A partial is overwritten two reductions later: the barrier of the next one is in between.
    cluster_arrive();
    cluster_wait();
    uint4 found = Combine::none();
    for (int i = lane; i < BLOCKS * WARPS; i += 32) {
        const saddr local = shared_address(partial + i % WARPS);
        const float4 v = load_cluster16(cluster_address(local, i / WARPS));
        found = Combine::of(found, make_uint4(float_bits(v.x), float_bits(v.y), float_bits(v.z),
                                              float_bits(v.w)));
    }
    return over_warp<Combine>(found);
}

// Calls f(logits, stored row of the first) for each four logits of this thread. They belong to no
// other thread, so that a change needs no barrier.
template <class F> DEVICE void each_four(const Row& row, F f) {
#pragma unroll 2
    for (int i = row.from; i < row.to; i += THREADS) {
        const float4 v = row.x[i];
        float four[4] = {v.x, v.y, v.z, v.w};
        f(four, row.begin + 4 * i);
    }
}

// Drops the logits x for which drop(x, stored row).
template <class F> DEVICE void drop_if(Row& row, F drop) {
    int from = PART, to = 0;
    for (int i = row.from; i < row.to; i += THREADS) {
        const float4 v = row.x[i];
        float four[4] = {v.x, v.y, v.z, v.w};
        bool left = false;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (drop(four[j], row.begin + 4 * i + j)) four[j] = minus_infinity();
            left = left || four[j] >= LOWEST;
        }
        row.x[i] = make_float4(four[0], four[1], four[2], four[3]);
        if (left) from = min(from, i), to = i + 1;
    }
    row.from = from, row.to = to;
}

// ---- ranks -------------------------------------------------------------------------------------

// Processed logits before truncation.
struct Scale {
    float largest, inverse;
    DEVICE float operator()(float x) const { return mul_rn(add_rn(x, -largest), inverse); }
    DEVICE u32 weight(float x) const {
        return static_cast<u32>(rintf(mul_rn(exp_rn((*this)(x)), WEIGHT_SCALE)));
    }
};

struct Total {
    u32 count;
    u64 amount;
};

DEVICE Total total_of(Row& row, u32 count, u64 amount) {
    const uint4 sum = over_cluster<Sum>(
        row, make_uint4(count, static_cast<u32>(amount), static_cast<u32>(amount >> 32), 0));
    return {sum.x, joined(sum.y, sum.z)};
}

// Of the logits from `from` up to but excluding `to`: their number, and the sum of their weights,
// or the number again.
DEVICE Total total_between(Row& row, Scale z, bool weighted, float from, float to) {
    u32 count = 0;
    u64 amount = 0;
    each_four(row, [&](const float (&x)[4], int) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const bool inside = x[j] >= from && x[j] < to;
            count += inside;
            if (weighted && inside) amount += z.weight(x[j]);
        }
    });
    return total_of(row, count, weighted ? amount : count);
}

// Among the logits equal to `value`, drops all but the first `count` by stored row.
DEVICE void keep_equals(Row& row, float value, u64 count) {
    int low = -1, high = row.vocab - 1;
    while (high - low > 1) {
        const int middle = low + (high - low) / 2;
        u32 before = 0;
        each_four(row, [&](const float (&x)[4], int at) {
#pragma unroll
            for (int j = 0; j < 4; ++j) before += x[j] == value && at + j <= middle;
        });
        if (total_of(row, before, 0).count >= count)
            high = middle;
        else
            low = middle;
    }
    drop_if(row, [&](float x, int at) { return x == value && at > high; });
}

// Drops all but the shortest prefix of ranks whose amounts sum to at least `goal`, at least 1 and
// at most the sum `all` of all that are left.
DEVICE void keep_prefix(Row& row, Scale z, bool weighted, u64 goal, Total all) {
    u32 low = order_of(LOWEST), high = order_of(z.largest) + 1;
    Total below = all, above{0, 0};  // of the logits from low on, from high on
    u32 middle = high - low > NEAR ? high - NEAR : low + (high - low) / 2;  // probably below
    while (high - low > 1 && below.count - above.count > 1) {
        Total found = total_between(row, z, weighted, of_order(middle), of_order(high));
        found.count += above.count;
        found.amount += above.amount;
        if (found.amount >= goal)
            low = middle, below = found;
        else
            high = middle, above = found;
        middle = low + (high - low) / 2;
    }
    const float from = of_order(low);
    drop_if(row, [&](float x, int) { return x < from; });
    const u32 equal = below.count - above.count;
    if (equal < 2) return;
    const u64 each = (below.amount - above.amount) / equal;
    const u64 wanted = (goal - above.amount + each - 1) / each;
    if (wanted < equal) keep_equals(row, from, wanted);
}

// Drops what top-k, top-p and min-p exclude.
DEVICE void truncate(Row& row, Scale z, int top_k, float top_p, float min_log_p) {
    const float above = -minus_infinity();
    if (top_k > 0) {
        const Total all = total_between(row, z, false, LOWEST, above);
        if (all.count > static_cast<u32>(top_k)) keep_prefix(row, z, false, top_k, all);
    }
    if (top_p < 1.0f) {
        const Total all = total_between(row, z, true, LOWEST, above);
        const double goal = ceil(static_cast<double>(top_p) * static_cast<double>(all.amount));
        keep_prefix(row, z, true, goal > 1 ? static_cast<u64>(goal) : 1, all);
    }
    if (min_log_p >= LOWEST) drop_if(row, [&](float x, int) { return z(x) < min_log_p; });
}

// ---- the steps ---------------------------------------------------------------------------------

struct Call {
    const float* logits;
    const i32* id_map;
    const u32* mask;
    i32 width, vocab, words, first;
};

// Loads this block's logits of a row: minus infinity where the mask forbids the id and from vocab
// on. Returns the largest's order, and whether one below vocab is NaN or positive infinity.
DEVICE uint4 load(const Call& c, const Row& row, int at_row) {
    const float* const from = c.logits + static_cast<i64>(at_row) * c.width;
    const bool wide = c.width % 4 == 0;
    float largest = minus_infinity();
    bool fault = false;
#pragma unroll 4
    for (int i = threadIdx.x; i < PART / 4; i += THREADS) {
        const int at = row.begin + 4 * i;
        float four[4] = {0, 0, 0, 0};
        u32 allowed = 0xf;
        if (at < c.vocab) {
            if (wide) {
                const float4 v = *reinterpret_cast<const float4*>(from + at);
                four[0] = v.x, four[1] = v.y, four[2] = v.z, four[3] = v.w;
            }
            if (c.mask) allowed = c.mask[at_row * c.words + at / 32] >> (at % 32);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (!wide && at + j < c.vocab) four[j] = from[at + j];
            if (at + j >= c.vocab) four[j] = minus_infinity();
            fault = fault || !(four[j] < -minus_infinity());
            four[j] = allowed >> j & 1 ? add_rn(four[j], 0.0f) : minus_infinity();
            if (four[j] > largest) largest = four[j];
        }
        row.x[i] = make_float4(four[0], four[1], four[2], four[3]);
    }
    return make_uint4(order_of(largest), fault, 0, 0);
}

DEVICE u32 word_of(uint4 four, int id) {
    return id & 2 ? (id & 1 ? four.w : four.z) : (id & 1 ? four.y : four.x);
}

// Draws among the logits that are left.
DEVICE uint4 draw(const Call& c, const Row& row, Scale z, Seed seed, int position, u32 purpose) {
    uint4 best = Draw::none();
    each_four(row, [&](const float (&x)[4], int at) {
        if (!(x[0] >= LOWEST || x[1] >= LOWEST || x[2] >= LOWEST || x[3] >= LOWEST)) return;
        uint4 words = make_uint4(0, 0, 0, 0);
        if (!MAPPED) words = noise_words(seed, position, at / 4, purpose);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (!(x[j] >= LOWEST)) continue;
            int id = at + j, lane = j;
            if (MAPPED) {
                id = c.id_map[id], lane = id % 4;
                words = noise_words(seed, position, id / 4, purpose);
            }
            const float score = add_rn(add_rn(z(x[j]), gumbel(word_of(words, lane))), 0.0f);
            best = Draw::of(best, make_uint4(order_of(score), id, order_of(x[j]), at + j));
        }
    });
    return best;
}

// ---- rejection ---------------------------------------------------------------------------------

#if CANDIDATES
#define REJECTION_PORTS const i32 *tokens, const i32 *rejected, const i32 *candidates, const float *scores,
static_assert(!MAPPED && CANDIDATES <= 32, "a lane has one candidate; ids are stored rows");

DEVICE u64 law_weight(float z) {
    return static_cast<u64>(rintf(mul_rn(exp_rn(z), 17592186044416.0f)));  // 2^44
}

DEVICE u64 warp_sum(u64 x) {
#pragma unroll
    for (int mask = 16; mask; mask /= 2)
        x += joined(shuffle_xor(static_cast<u32>(x), mask),
                    shuffle_xor(static_cast<u32>(x >> 32), mask));
    return x;
}

// A row's draft and what it was drawn from, as one lane sees it: lane c has candidate c.
struct Drafted {
    bool drawn;  // of the row: the draft is a candidate
    int draft;   // of the row
    int id;      // this lane's candidate, or -1
    double q;    // its probability
    double of_draft;
};

DEVICE Drafted drafted_of(const i32* tokens, const i32* candidates, const float* scores, int row) {
    const int lane = threadIdx.x % 32, at = row * CANDIDATES + lane;
    Drafted d{false, tokens[row + 1], -1, 0.0, 0.0};
    if (lane < CANDIDATES) d.id = candidates[at];
    const float score = d.id >= 0 ? scores[at] : minus_infinity();
    float largest = score;
#pragma unroll
    for (int mask = 16; mask; mask /= 2) {
        const float other = bits_float(shuffle_xor(float_bits(largest), mask));
        largest = other > largest ? other : largest;
    }
    const u64 weight = d.id >= 0 ? law_weight(add_rn(score, -largest)) : 0;
    const bool here = d.id >= 0 && d.id == d.draft;
    const double all = static_cast<double>(warp_sum(weight));
    d.drawn = ballot(here) != 0;
    d.q = static_cast<double>(weight) / all;
    d.of_draft = static_cast<double>(warp_sum(here ? weight : 0)) / all;
    return d;
}

// Draws from what p has more than q, unless the draft is accepted. Candidates are drawn by the
// block that has their logit, in its first warp, and are dropped from its row.
DEVICE uint4 reject(const Call& c, Row& row, Scale z, Seed seed, int position, const Drafted& d,
                    bool& accepted) {
    const bool first = threadIdx.x < 32;
    const int at = d.id - row.begin;
    float* const own = reinterpret_cast<float*>(row.x);
    sync_block();  // what was dropped by other threads
    const bool mine = first && at >= 0 && at < PART;
    const float x = mine ? own[at] : minus_infinity();
    const u64 weight = x >= LOWEST ? law_weight(z(x)) : 0;
    u64 amount = 0;
    each_four(row, [&](const float (&v)[4], int) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (v[j] >= LOWEST) amount += law_weight(z(v[j]));
    });
    const uint4 sums =
        over_cluster<Amounts>(row, Amounts::of(amount, d.id == d.draft ? weight : 0));
    const double all = static_cast<double>(joined(sums.x, sums.y));
    const u32 word = noise_words(seed, position, 0, NOISE_ACCEPT).x;
    const double u = (static_cast<double>(word) + 0.5) * 0x1p-32;
    accepted = u * d.of_draft * all < static_cast<double>(joined(sums.z, sums.w));

    if (mine) own[at] = minus_infinity();
    sync_block();
    uint4 best = draw(c, row, z, seed, position, NOISE_RESIDUAL);
    if (!(x >= LOWEST)) return best;
    const double rest = static_cast<double>(weight) - d.q * all;
    const float noise = gumbel(word_of(noise_words(seed, position, d.id / 4, NOISE_RESIDUAL), d.id));
    uint4 candidate = make_uint4(0, NO_ID, order_of(x), d.id);
    if (d.q == 0.0 || rest > 0.0) {
        const float s = d.q == 0.0 ? z(x) : log_rn(static_cast<float>(rest * 0x1p-44));
        candidate.x = order_of(add_rn(add_rn(s, noise), 0.0f)), candidate.y = d.id;
    }
    return Draw::of(best, candidate);
}
#else
#define REJECTION_PORTS
#endif

KERNEL void CLUSTERS_OF(BLOCKS) __launch_bounds__(THREADS, 1)
sample_rows(const float* logits, const i32* id_map, const u32* mask, const i32* length,
            const u32* seed, const float* temperature, const i32* top_k, const float* top_p,
            const float* min_log_p, REJECTION_PORTS i32* choice, i32* last, i32 width, i32 vocab, i32 words,
            i32 first) {
    __shared__ uint4 partial[2][WARPS];
    DYNAMIC_SHARED(memory);
    let_next_start();
    wait_for_previous();
    const Call c{logits, id_map, mask, width, vocab, words, first};
    const int begin = static_cast<int>(cluster_rank()) * PART, at = blockIdx.y;
    Row row{partial, reinterpret_cast<float4*>(memory), begin, vocab,
            static_cast<int>(threadIdx.x), PART / 4, 0};

    const uint4 top = over_cluster<Greatest>(row, load(c, row, at));
    const Scale z{of_order(top.x), 1.0f / *temperature};
    uint4 drawn = Draw::none();
    const bool usable = !top.y && z.largest >= LOWEST;
    const Seed key{seed[0], seed[1]};
    const int position = *length + first + at;
#if CANDIDATES
    Drafted d{false, NO_ID, -1, 0.0, 0.0};
    if (at < *rejected) d = drafted_of(tokens, candidates, scores, at);
    bool accepted = false;
#endif
    if (usable) {
        truncate(row, z, *top_k, *top_p, *min_log_p);
#if CANDIDATES
        if (d.drawn)
            drawn = reject(c, row, z, key, position, d, accepted);
        else
#endif
            drawn = draw(c, row, z, key, position, NOISE_TARGET);
    }
    drawn = over_cluster<Draw>(row, drawn);
#if CANDIDATES
    if (d.drawn && (accepted || drawn.y == NO_ID)) drawn.y = d.draft;
#endif
    cluster_arrive();  // no block ends while another reads its partial results
    cluster_wait();
    if (cluster_rank() == 0 && threadIdx.x == 0) {
        choice[at] = usable ? static_cast<i32>(drawn.y) : -1;
        if (last) last[at] = usable ? static_cast<i32>(drawn.w) : -1;
    }
}
