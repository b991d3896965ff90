// accept: from logits to the record in one launch.
// Grid: slices of a row x rows. Each block stores the summary of its slice in a few words; the last
// block to finish combines them in order, decides each row in one lane, and writes the record.
#include "cuda/vocab_slice.cuh"

constexpr int FAULT = -1;  // as a slice's id: the slice has NaN or positive infinity
constexpr int STRICT = 0, LOG_MARGIN = 1;

// With SAMPLED, choices come from `sample`, and relaxed rules see its processed logits.
#if SAMPLED
#define SAMPLED_PORTS const i32 *sampled, const i32 *last, const float *temperature,
#define SAMPLED_VALUES , sampled, last, temperature
#else
#define SAMPLED_PORTS
#define SAMPLED_VALUES
#endif

// See the operator's contract; `mask` may be null.
struct Call {
    const float* logits;
    const i32 *tokens, *forced, *drafted, *cap, *stop;
    const u32* mask;
    const i32 *rule, *top_k;
    const float* margin;
    const i32 *close, *strict, *soft;
    const float* soft_margin;
    i32 rows, width, vocab, words, stops, stricts;
#if SAMPLED
    const i32 *sampled, *last;
    const float* temperature;
#endif
};

// The summary of a slice, or of a row.
struct Found {
    Largest best;  // the best allowed id; or id FAULT, see there
    int ahead;     // allowed ids ranked before the draft
    float sum;     // of exp((logit - best) / temperature) over the allowed ids that sample keeps
};

struct Row {
    int follow, forced, soft;
    float draft_logit, soft_logit;
};

// The logit of an id; minus infinity if it is out of range or the mask forbids it.
DEVICE float allowed_logit(const Call& c, int row, int id) {
    if (id < 0 || id >= c.vocab) return minus_infinity();
    if (c.mask && !(c.mask[row * c.words + id / 32] >> (id % 32) & 1)) return minus_infinity();
    return c.logits[static_cast<i64>(row) * c.width + id];
}

// Returns the logit of the draft, and sets its id, if a relaxed rule needs its rank; else minus
// infinity.
DEVICE float ranked_draft(const Call& c, int row, int& id) {
    if (*c.rule == STRICT || row >= *c.drafted) return minus_infinity();
    id = c.tokens[row + 1];
    return allowed_logit(c, row, id);
}

DEVICE bool contains(const i32* ids, int count, int id) {
    bool found = false;
#pragma unroll 4
    for (int i = 0; i < count; ++i) found = found || ids[i] == id;
    return found;
}

#if SAMPLED
// The lowest rank that sample keeps in a row.
struct Lowest {
    float logit;
    int id;
    DEVICE bool keeps(float x, int of) const { return x > logit || (x == logit && of <= id); }
};

DEVICE Lowest lowest_of(const Call& c, int row) {
    const int id = c.last[row];
    return {allowed_logit(c, row, id), id};
}
#endif

// ---- one slice -------------------------------------------------------------------------------

// `mask`: the row's [words].
DEVICE void forbid(float (&x)[SLICE_HELD], const u32* mask, int words) {
    const int first = slice_start() / 32, bit = slice_start() % 32;
#pragma unroll
    for (int i = 0; i < SLICE_HELD; i += 4) {
        const int word = first + slice_offset(i) / 32;
        const u32 bits = word < words ? mask[word] >> bit : 0;
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (!(bits & 1u << j)) x[i + j] = minus_infinity();
    }
}

DEVICE int count_ahead(const float (&x)[SLICE_HELD], float logit, int id) {
    const int before = id - slice_start();
    int ahead = 0;
#pragma unroll
    for (int i = 0; i < SLICE_HELD; ++i)
        ahead += x[i] > logit || (x[i] == logit && slice_offset(i) < before);
    return ahead;
}

DEVICE float sum_exp(const Call& c, int row, const float (&x)[SLICE_HELD], float largest) {
    if (largest == minus_infinity()) return 0.0f;
    float sum = 0.0f;
#if SAMPLED
    const Lowest lowest = lowest_of(c, row);
#pragma unroll
    for (int i = 0; i < SLICE_HELD; ++i)
        if (lowest.keeps(x[i], slice_start() + slice_offset(i)))
            sum += expf((x[i] - largest) / *c.temperature);
#else
#pragma unroll
    for (int i = 0; i < SLICE_HELD; ++i) sum += expf(x[i] - largest);
#endif
    return sum;
}

DEVICE int warp_total(int x) {
#pragma unroll
    for (int mask = 16; mask; mask /= 2) x += shuffle_xor(x, mask);
    return x;
}

DEVICE float warp_total(float x) {
#pragma unroll
    for (int mask = 16; mask; mask /= 2) x += shuffle_xor(x, mask);
    return x;
}

// Totals over the block; valid in thread 0.
DEVICE void block_totals(int& ahead, float& sum) {
    __shared__ int ahead_of_warp[SLICE_WARPS];
    __shared__ float sum_of_warp[SLICE_WARPS];
    ahead = warp_total(ahead);
    sum = warp_total(sum);
    if (threadIdx.x % 32 == 0) {
        ahead_of_warp[threadIdx.x / 32] = ahead;
        sum_of_warp[threadIdx.x / 32] = sum;
    }
    sync_block();
#pragma unroll
    for (int w = 1; w < SLICE_WARPS; ++w) {
        ahead += ahead_of_warp[w];
        sum += sum_of_warp[w];
    }
}

DEVICE Found search_slice(const Call& c, int row) {
    float x[SLICE_HELD];
    slice_load(x, c.logits + static_cast<i64>(row) * c.width, c.width, c.vocab);
    int draft = -1;
    const float draft_logit = ranked_draft(c, row, draft);
    bool fault = false;
#pragma unroll
    for (int i = 0; i < SLICE_HELD; ++i) fault = fault || !(x[i] < -minus_infinity());
    if (c.mask) forbid(x, c.mask + row * c.words, c.words);
    bool any_fault;
    Found f{block_largest(slice_largest(x), fault, any_fault), 0, 0.0f};
    if (any_fault) {
        f.best.id = FAULT;
    } else if (draft_logit > minus_infinity()) {
        f.ahead = count_ahead(x, draft_logit, draft);
        if (*c.rule != LOG_MARGIN) f.sum = sum_exp(c, row, x, f.best.value);
        block_totals(f.ahead, f.sum);
    }
    return f;
}

// ---- the record ------------------------------------------------------------------------------

DEVICE Found unpack(float4 words) {
    return {{words.x, static_cast<int>(float_bits(words.y))},
            static_cast<int>(float_bits(words.z)), words.w};
}

DEVICE float4 pack(Found f) {
    return make_float4(f.best.value, bits_float(f.best.id), bits_float(f.ahead), f.sum);
}

// Combines the slices of one row. Called by one warp; every lane gets the result.
DEVICE Found combine(const Call& c, const float4* found, int slices, bool with_sum) {
    Found all{{minus_infinity(), 0x7fffffff}, 0, 0.0f};
    bool fault = false;
    for (int s = threadIdx.x % 32; s < slices; s += 32) {
        const Found f = unpack(load_shared_result(found + s));
        fault = fault || f.best.id == FAULT;
        all.best = larger(all.best, f.best);
        all.ahead += f.ahead;
    }
    all.best = warp_largest(all.best);
    all.ahead = warp_total(all.ahead);
    if (with_sum) {
        for (int s = threadIdx.x % 32; s < slices; s += 32) {
            const Found f = unpack(load_shared_result(found + s));
#if SAMPLED
            all.sum += f.sum * expf((f.best.value - all.best.value) / *c.temperature);
#else
            all.sum += f.sum * expf(f.best.value - all.best.value);
#endif
        }
        all.sum = warp_total(all.sum);
    }
    if (ballot(fault)) all.best.id = FAULT;
    return all;
}

DEVICE Row read_row(const Call& c, int row) {
    Row r{-1, -1, -1, minus_infinity(), minus_infinity()};
    if (row >= c.rows) return r;
    r.forced = c.forced[row];
    r.soft = c.soft[row];
    r.soft_logit = allowed_logit(c, row, r.soft);
    if (row < c.rows - 1) r.follow = c.tokens[row + 1];
    int draft;
    r.draft_logit = ranked_draft(c, row, draft);
    return r;
}

// Whether a draft that is not the row's choice is near enough to the best id. In double, as in the
// reference: logits are exact and the difference is rounded once.
DEVICE bool accepts_relaxed(const Call& c, const Row& r, const Found& f) {
    const double margin = *c.margin;
#if SAMPLED
    const int row = threadIdx.x;
    if (row < c.rows && !lowest_of(c, row).keeps(r.draft_logit, r.follow)) return false;
    const double temperature = *c.temperature;
#endif
    if (margin <= 0 || r.forced >= 0 || !(r.draft_logit > minus_infinity())) return false;
    if (f.ahead >= *c.top_k) return false;
    if (contains(c.strict, c.stricts, r.follow) || contains(c.stop, c.stops, r.follow))
        return false;
    const double draft = r.draft_logit, best = f.best.value;
#if SAMPLED
    if (*c.rule == LOG_MARGIN) return draft >= best - margin * temperature;
    const double all = f.sum;
    return expf((r.draft_logit - f.best.value) / *c.temperature) / all >= 1.0 / all - margin;
#else
    if (*c.rule == LOG_MARGIN) return draft >= best - margin;
    const double sum = f.sum;
    return expf(r.draft_logit - f.best.value) / sum >= 1.0 / sum - margin;
#endif
}

// Called by one warp; lane i decides row i.
DEVICE void write_record(const Call& c, const Row& r, const Found& f, i32* record) {
    const int row = threadIdx.x;
    const bool fault = row >= c.rows || f.best.id == FAULT;
    const bool free = r.forced < 0;
    const bool usable = !fault && (!free || f.best.value > minus_infinity());
#if SAMPLED
    const int own = row < c.rows ? c.sampled[row] : -1;
    const int best = !usable ? -1 : free ? own : r.forced;
#else
    const int best = !usable ? -1 : free ? f.best.id : r.forced;
#endif
    const double soft_margin = *c.soft_margin;
    const bool soften = usable && free && r.soft_logit > minus_infinity() &&
                        r.soft_logit >= f.best.value - soft_margin;
    const int choice = soften ? r.soft : best;

    // -1 is no id: if a token of -1 equals an unused close or stop, the commit has ended anyway.
    const u32 closing = ballot(r.follow == *c.close);
    const bool open = !closing || row < __ffs(closing) - 1;
    const bool agrees =
        row < *c.drafted && usable &&
        (r.follow == choice || (open && best == choice && accepts_relaxed(c, r, f)));
    const int agreed = __ffs(~ballot(agrees)) - 1;
    const int token = row < agreed ? r.follow : choice;
    int count = min(agreed + 1, *c.cap);
    const u32 ends = ballot(row < count && contains(c.stop, c.stops, token));
    if (ends) count = __ffs(ends);

    const bool committed = row < count;
    const int last_choice = shuffle(choice, count - 1);
    const int relaxed = __popc(ballot(committed && token != choice));
    const int softened = __popc(ballot(committed && best != choice));
    if (row == 0) {
        record[0] = count;
        record[1] = last_choice < 0 ? count - 1 : -1;
        record[2] = relaxed;
        record[3] = agreed;
        record[4] = softened;
    }
    if (row >= c.rows) return;
    record[5 + row] = token;
    record[5 + c.rows + row] = choice;
}

// Writes the record from the summaries of all slices of all rows. Called by the whole block.
DEVICE void finish(const Call& c, const float4* found, int slices, i32* record) {
    __shared__ Found of_row[MOST_ROWS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Row mine = read_row(c, lane);  // loaded before the slices are combined
    for (int row = warp; row < c.rows; row += SLICE_WARPS) {
        const Found all = combine(c, found + row * slices, slices, *c.rule > LOG_MARGIN);
        if (lane == 0) of_row[row] = all;
    }
    sync_block();
    if (warp == 0) write_record(c, mine, of_row[lane < c.rows ? lane : 0], record);
}

// found [rows, slices]; arrivals [1], zero before and after.
KERNEL void __launch_bounds__(SLICE_THREADS, 3)
accept_rows(const float* logits, const i32* tokens, const i32* forced, const i32* drafted,
            const i32* cap, const i32* stop, const u32* mask, const i32* rule, const i32* top_k,
            const float* margin, const i32* close, const i32* strict, const i32* soft,
            const float* soft_margin, SAMPLED_PORTS i32* record, float4* found, u32* arrivals, i32 rows,
            i32 width, i32 vocab, i32 words, i32 stops, i32 stricts) {
    let_next_start();
    wait_for_previous();
    const Call c{logits, tokens, forced, drafted, cap,  stop,  mask,  rule,  top_k, margin,
                 close,  strict, soft,   soft_margin,   rows,  width, vocab, words, stops,
                 stricts SAMPLED_VALUES};
    const int slices = gridDim.x;
    const Found here = search_slice(c, blockIdx.y);
    if (threadIdx.x == 0) found[blockIdx.y * slices + blockIdx.x] = pack(here);
    if (last_to_arrive(arrivals, gridDim.x * gridDim.y)) finish(c, found, slices, record);
}
