// selector, second part: the scores of all pairs of neighbouring rows' candidates, then the walk.
// Grid: rows from 1 on. Each block scores its row's candidates after each of those of the row
// before; the last block to finish walks, in one warp.
//
// Compile-time: TOP_K, at most 32; RANK, a multiple of 8, 0: no edges; DRAWN, whether noise is added;
// REJECTION, whether it is noise of its own, and the law of each draw is written.
#include "cuda/noise.cuh"
#include "cuda/vocab_slice.cuh"
#include "linear/vec8.cuh"

constexpr int THREADS = SLICE_THREADS;
constexpr int PITCH = RANK + 4;  // floats: so that 8 threads read 8 rows from different banks
constexpr int PAIRS = TOP_K * TOP_K;
#if REJECTION
constexpr u32 PURPOSE = NOISE_DRAFT;
#define LAW_PORTS i32 *candidates, float *laws,
#define LAW_VALUES , candidates, laws
#else
constexpr u32 PURPOSE = NOISE_TARGET;
#define LAW_PORTS
#define LAW_VALUES
#endif

struct Inputs {
    const i32* ids;      // [T - 1, TOP_K], or below 0
    const float* unary;  // the same shape
    const u16 *hidden, *predecessors, *successors;
    const i32 *last, *forced;
    const i32 *length, *seed;
    const float* temperature;
#if REJECTION
    i32* candidates;  // [T, TOP_K]
    float* laws;      // the same shape
#endif
};

// The id before the `row`-th drafted row that is known before the walk, or -1.
DEVICE int fixed_before(const Inputs& in, int row) { return row == 0 ? *in.last : in.forced[row - 1]; }

// Loads a codebook's rows, the first `befores` of them those of predecessors, times the row's
// `hidden`, then TOP_K of successors, to `to` [2 * TOP_K][PITCH].
DEVICE void load_codes(float* to, const Inputs& in, int row, int befores) {
#if RANK
    const u16* const hidden = in.hidden + static_cast<i64>(row + 1) * RANK;
    const int fixed = fixed_before(in, row);
    for (int i = threadIdx.x; i < (befores + TOP_K) * (RANK / 8); i += THREADS) {
        const int n = i / (RANK / 8), column = i % (RANK / 8) * 8;
        const bool before = n < befores;
        const int id = !before ? in.ids[row * TOP_K + n - befores]
                       : fixed >= 0 ? fixed : in.ids[(row - 1) * TOP_K + n];
        const u16* const book = before ? in.predecessors : in.successors;
        float v[8], h[8];
        unpack8(v, *reinterpret_cast<const uint4*>(book + static_cast<i64>(max(id, 0)) * RANK + column));
        unpack8(h, *reinterpret_cast<const uint4*>(hidden + column));
        float* const at = to + (before ? n : TOP_K + n - befores) * PITCH + column;
#pragma unroll
        for (int k = 0; k < 8; ++k) at[k] = before ? v[k] * h[k] : v[k];
    }
#endif
}

DEVICE float dot(const float* a, const float* b) {
    float sum = 0.0f;
#pragma unroll 4
    for (int i = 0; i < RANK; i += 4) {
        const float4 x = *reinterpret_cast<const float4*>(a + i);
        const float4 y = *reinterpret_cast<const float4*>(b + i);
        sum = fma_rn(x.x, y.x, sum);
        sum = fma_rn(x.y, y.y, sum);
        sum = fma_rn(x.z, y.z, sum);
        sum = fma_rn(x.w, y.w, sum);
    }
    return sum;
}

// The noise of a candidate: without REJECTION that of the target's own draw at the position.
DEVICE float noise_of(const Inputs& in, int row, int id) {
    const Seed seed{static_cast<u32>(in.seed[0]), static_cast<u32>(in.seed[1])};
    const uint4 four = noise_words(seed, *in.length + row + 1, static_cast<u32>(id) / 4, PURPOSE);
    const u32 word = id % 4 == 0 ? four.x : id % 4 == 1 ? four.y : id % 4 == 2 ? four.z : four.w;
    return gumbel(word);
}

// Writes what the draft after a row was drawn from; lane c has candidate c.
DEVICE void write_law(const Inputs& in, int row, int id, float score) {
#if REJECTION
    const int lane = threadIdx.x;
    const bool finite = score > minus_infinity() && score < -minus_infinity();
    if (lane >= TOP_K) return;
    in.candidates[row * TOP_K + lane] = finite ? id : -1;
    in.laws[row * TOP_K + lane] = finite ? score : minus_infinity();
#endif
}

// One warp: lane c has candidate c. scores [T - 1][TOP_K before][TOP_K], in shared memory.
DEVICE void walk(const Inputs& in, const float* scores, i32* tokens, int rows) {
    const int lane = threadIdx.x;
    if (lane == 0) tokens[0] = *in.last;
    int before = 0;
#pragma unroll 1
    for (int row = 0; row < rows - 1; ++row) {
        const bool there = lane < TOP_K;
        float score = there ? scores[row * PAIRS + before * TOP_K + lane] : minus_infinity();
        const int id = there ? in.ids[row * TOP_K + lane] : 0;
        if (DRAWN && score > minus_infinity()) {
            score = mul_rn(score, 1.0f / *in.temperature);
            write_law(in, row, id, score);
            score = add_rn(score, noise_of(in, row, id));
        } else {
            write_law(in, row, -1, minus_infinity());
        }
        const Largest best = warp_largest({score, lane});
        const int must = in.forced[row];
        const bool found = best.value > minus_infinity();
        const int choice = shuffle(id, best.id);
        if (lane == 0) tokens[row + 1] = must >= 0 ? must : found ? choice : 0;
        // A row has one predecessor if that is forced, and 0 stands for that of a row without
        // candidates.
        before = must < 0 && found ? best.id : 0;
    }
    write_law(in, rows - 1, -1, minus_infinity());
}

// tokens [rows]; scores [rows - 1, TOP_K, TOP_K]; arrivals [1], zero before and after.
KERNEL void __launch_bounds__(THREADS)
selector_walk(const i32* ids, const float* unary, const u16* hidden, const u16* predecessors,
              const u16* successors, const i32* last, const i32* forced, const i32* length,
              const i32* seed, const float* temperature, i32* tokens, LAW_PORTS float* scores,
              u32* arrivals, i32 rows) {
    DYNAMIC_SHARED(memory);
    float* const held = reinterpret_cast<float*>(memory);
    let_next_start();
    wait_for_previous();
    const Inputs in{ids,  unary,  hidden, predecessors, successors,
                    last, forced, length, seed,         temperature LAW_VALUES};
    const int row = blockIdx.x, befores = fixed_before(in, row) >= 0 ? 1 : TOP_K;
    load_codes(held, in, row, befores);
    sync_block();
    for (int i = threadIdx.x; i < befores * TOP_K; i += THREADS) {
        const int c = i % TOP_K;
        const float edge = RANK ? dot(held + i / TOP_K * PITCH, held + (TOP_K + c) * PITCH) : 0.0f;
        scores[row * PAIRS + i] =
            ids[row * TOP_K + c] >= 0 ? unary[row * TOP_K + c] + edge : minus_infinity();
    }
    sync_block();
    if (!last_to_arrive(arrivals, gridDim.x)) return;
    for (int i = threadIdx.x; i < (rows - 1) * PAIRS; i += THREADS)
        held[i] = load_shared_result(scores + i);
    sync_block();
    if (threadIdx.x < 32) walk(in, held, tokens, rows);
}
