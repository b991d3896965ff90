// image_attention in two launches: turn_patches rotates queries and keys and lays out queries, keys
// and values by head, [3][heads][padded][PITCH], padding zero; attend_patches goes through keys and
// values in tiles of 64 patches, with a running softmax, for 64 queries of a head. A warp has 16
// queries, whose sums stay in registers. A row's sums are made in order of the tiles, whatever else
// is in the launch.
//
// Compile-time: DIM, columns of a head; PITCH, the same rounded up to 16.
#include "cuda/device.cuh"

constexpr int THREADS = 128, WARPS = THREADS / 32;
constexpr int TILE = 64;
constexpr int ROW_BYTES = 2 * PITCH + 16;  // 16 more, so that eight rows lie in different banks
constexpr int TILE_BYTES = TILE * ROW_BYTES;
constexpr int STEPS = PITCH / 16;    // of a product over a head's columns
constexpr int STRIPS = PITCH / 8;    // of 8 columns of a result
constexpr int KEYS = TILE / 8;       // strips of 8 keys
constexpr float LOWEST = -3.0e38f;  // of a score that counts for nothing
static_assert(DIM % 8 == 0 && PITCH % 16 == 0, "DIM");

// Grid: patches, padded to whole tiles. A thread turns some pairs of columns (j, j + DIM / 2).
KERNEL void __launch_bounds__(THREADS)
turn_patches(const u16* qkv, const i32* row_of, const i32* column_of, const i32* count,
             const float* __restrict__ frequency, u16* turned, int patches, int padded, int heads) {
    constexpr int HALF = DIM / 2, AXIS = DIM / 4;
    const int p = blockIdx.x;
    let_next_start();
    wait_for_previous();
    const bool there = p < *count;
    const float row = there ? static_cast<float>(row_of[p]) : 0.0f;
    const float column = there ? static_cast<float>(column_of[p]) : 0.0f;
    const i64 part = static_cast<i64>(heads) * padded * PITCH;
    const u16* const from = qkv + static_cast<i64>(p) * 3 * heads * DIM;
    for (int i = threadIdx.x; i < heads * (PITCH / 2); i += THREADS) {
        const int head = i / (PITCH / 2), j = i % (PITCH / 2);
        u16* const to = turned + (static_cast<i64>(head) * padded + p) * PITCH;
        if (j >= HALF) {  // the padding of a head's row
            const int at = DIM + 2 * (j - HALF);
#pragma unroll
            for (int which = 0; which < 3; which++)
                *reinterpret_cast<u32*>(to + which * part + at) = 0;
            continue;
        }
        const float by = frequency[j < AXIS ? j : j - AXIS];
        const float angle = mul_rn(j < AXIS ? row : column, by);
        const float c = cosf(angle), s = sinf(angle);
#pragma unroll
        for (int which = 0; which < 3; which++) {
            const u16* const x = from + (which * heads + head) * DIM;
            u16 low = 0, high = 0;
            if (there && which < 2) {
                const float a = bf16_float(x[j]), b = bf16_float(x[j + HALF]);
                low = float_bf16(fma_rn(a, c, -mul_rn(b, s)));
                high = float_bf16(fma_rn(b, c, mul_rn(a, s)));
            } else if (there) {
                low = x[j], high = x[j + HALF];
            }
            to[which * part + j] = low, to[which * part + j + HALF] = high;
        }
    }
}

// Starts copying 64 rows to shared memory. Called by the whole block.
DEVICE void fetch(saddr to, const u16* from) {
    constexpr int CHUNKS = PITCH / 8;
    for (int i = threadIdx.x; i < TILE * CHUNKS; i += THREADS)
        copy_async16(to + i / CHUNKS * ROW_BYTES + i % CHUNKS * 16, from + i * 8);
}

// The address from which this lane gives a row of four 8 x 8 matrices, two of rows and two of columns.
DEVICE saddr matrix_row(saddr tile, int row, int column, int lane) {
    return tile + (row + lane % 16) * ROW_BYTES + column * 2 + lane / 16 * 16;
}

struct Softmax {
    float best[2], total[2];  // of rows lane / 4 and lane / 4 + 8

    // Turns scores, already times log2(e) / sqrt(DIM), into weights; returns the factors of earlier sums.
    DEVICE void weigh(float (&s)[KEYS][4], float (&keep)[2]) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float top = best[half];
#pragma unroll
            for (int n = 0; n < KEYS; n++) top = fmaxf(top, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
            top = fmaxf(top, shuffle_xor(top, 1));
            top = fmaxf(top, shuffle_xor(top, 2));
            keep[half] = exp2_approx(best[half] - top);
            best[half] = top;
            float sum = 0.0f;
#pragma unroll
            for (int n = 0; n < KEYS; n++) {
                s[n][2 * half] = exp2_approx(s[n][2 * half] - top);
                s[n][2 * half + 1] = exp2_approx(s[n][2 * half + 1] - top);
                sum += s[n][2 * half] + s[n][2 * half + 1];
            }
            total[half] = fma_rn(total[half], keep[half], sum);
        }
    }
};

// Scores of 16 queries with the 64 keys of a tile, times `scale`; of keys from `end` on, minus infinity.
DEVICE void score(float (&s)[KEYS][4], const u32 (&q)[STEPS][4], saddr keys, float scale, int end,
                  int lane) {
#pragma unroll
    for (int n = 0; n < KEYS; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) s[n][i] = 0.0f;
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
#pragma unroll
        for (int n = 0; n < KEYS; n += 2) {
            u32 b[4];  // keys 8n.., columns 16k.. and 16k + 8..; keys 8n + 8.. likewise
            const saddr at = keys + (n * 8 + lane / 16 * 8 + lane % 8) * ROW_BYTES + k * 32 +
                             lane / 8 % 2 * 16;
            load_matrix4(b, at);
            mma_bf16(s[n], q[k], b[0], b[1]);
            mma_bf16(s[n + 1], q[k], b[2], b[3]);
        }
    }
    const int own = lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < KEYS; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) s[n][i] = n * 8 + own + i % 2 < end ? s[n][i] * scale : LOWEST;
}

// Adds the values of a tile, by their weights.
DEVICE void mix(float (&o)[STRIPS][4], const float (&s)[KEYS][4], saddr values, int lane) {
#pragma unroll
    for (int k = 0; k < TILE / 16; k++) {
        const u32 a[4] = {
            pack_bf16x2(s[2 * k][0], s[2 * k][1]), pack_bf16x2(s[2 * k][2], s[2 * k][3]),
            pack_bf16x2(s[2 * k + 1][0], s[2 * k + 1][1]), pack_bf16x2(s[2 * k + 1][2], s[2 * k + 1][3])};
#pragma unroll
        for (int n = 0; n < STRIPS; n += 2) {
            u32 b[4];  // keys 16k.. and 16k + 8.. of columns 8n..; the same of columns 8n + 8..
            load_matrix4_transposed(b, matrix_row(values, k * 16, n * 8, lane));
            mma_bf16(o[n], a, b[0], b[1]);
            mma_bf16(o[n + 1], a, b[2], b[3]);
        }
    }
}

// Grid: tiles of 64 queries, heads.
KERNEL void __launch_bounds__(THREADS)
attend_patches(const u16* turned, const i32* count_at, u16* out, int patches, int padded,
               float scale) {
    DYNAMIC_SHARED(memory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, heads = gridDim.y;
    const int head = blockIdx.y, first = blockIdx.x * TILE;
    let_next_start();
    wait_for_previous();
    const int count = *count_at;
    const i64 part = static_cast<i64>(heads) * padded * PITCH;
    const u16* const q = turned + (static_cast<i64>(head) * padded + first) * PITCH;
    const u16* const k = turned + part + static_cast<i64>(head) * padded * PITCH;
    const u16* const v = k + part;
    const saddr tiles = shared_address(memory);
    float o[STRIPS][4] = {};
    Softmax softmax = {{LOWEST, LOWEST}, {0.0f, 0.0f}};
    const int row = first + warp * 16 + lane / 4, steps = (count + TILE - 1) / TILE;
    if (first < count) {
        u32 mine[STEPS][4];
        fetch(tiles, q);
        copy_async_commit();
        copy_async_wait<0>();
        sync_block();
#pragma unroll
        for (int i = 0; i < STEPS; i++)
            load_matrix4(mine[i], matrix_row(tiles, warp * 16, i * 16, lane));
        u32 seen = 0;
#pragma unroll
        for (int i = 0; i < STEPS; i++) seen ^= mine[i][0] ^ mine[i][1] ^ mine[i][2] ^ mine[i][3];
        received(seen);
        sync_block();
        fetch(tiles, k);
        fetch(tiles + TILE_BYTES, v);
        copy_async_commit();
#pragma unroll 1
        for (int step = 0; step < steps; step++) {
            const saddr now = tiles + step % 2 * 2 * TILE_BYTES;
            if (step + 1 < steps) {
                const saddr next = tiles + (step + 1) % 2 * 2 * TILE_BYTES;
                const i64 at = static_cast<i64>(step + 1) * TILE * PITCH;
                fetch(next, k + at);
                fetch(next + TILE_BYTES, v + at);
                copy_async_commit();
                copy_async_wait<1>();
            } else {
                copy_async_wait<0>();
            }
            sync_block();
            float s[KEYS][4], keep[2];
            score(s, mine, now, scale, count - step * TILE, lane);
            softmax.weigh(s, keep);
#pragma unroll
            for (int n = 0; n < STRIPS; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) o[n][i] *= keep[i / 2];
            mix(o, s, now + TILE_BYTES, lane);
            // Every warp has read the tile before the next copies overwrite it. A strip's sums
            // depend on all loads of its values, and through the weights on those of the keys.
            u32 used = 0;
#pragma unroll
            for (int n = 0; n < STRIPS; n += 2) used ^= float_bits(o[n][0]);
            received(used);
            sync_block();
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float total = softmax.total[half];
        total += shuffle_xor(total, 1);
        total += shuffle_xor(total, 2);
        const int p = row + 8 * half;
        const float by = p < count ? 1.0f / total : 0.0f;
        if (p >= patches) continue;
        u16* const to = out + (static_cast<i64>(p) * heads + head) * DIM + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < STRIPS; n++) {
            if (n * 8 >= DIM) break;
            *reinterpret_cast<u32*>(to + n * 8) =
                p < count ? pack_bf16x2(o[n][2 * half] * by, o[n][2 * half + 1] * by) : 0;
        }
    }
}
