// The walk over a prefill's chunks (chunk.cuh). A warp owns 16 columns of a value head and keeps
// S^T in accumulators of matrix products, whose layout is also that of the next product's left
// operand. Warps synchronise only around the loads of a chunk. State, records and tail were written
// in an earlier step (see decode.cu).
#include "gdn/chunk.cuh"

constexpr int SLAB = 16 * WARPS;               // columns of a thread block
constexpr int VALUE_PITCH = SLAB + 4;          // floats
constexpr int STAGE = KEY_BYTES + MATRIX_BYTES;

// A lane's position in its warp's S^T, 16 columns x 128 rows in 16 accumulators of 16 x 8: lane 4g
// + t holds columns g and g + 8, rows 8j + 2t and 8j + 2t + 1 in accumulator j.
struct Lane {
    int head, column;  // of the value head; column g
    int t;

    DEVICE i64 state(int j, int i) const {
        return (static_cast<i64>(head) * D + 8 * j + 2 * t + i % 2) * D + column + i / 2 * 8;
    }
};

// Rounds each element twice per record, as the fold in decode.cu does.
DEVICE void fold(float (&s)[D / 8][4], const Lane& lane, const float* record_k,
                 const float* record_d, const float* record_decay, int n, int key_heads,
                 int value_heads) {
    const int key_head = lane.head / (value_heads / key_heads);
    for (int r = 0; r < n; r++) {
        const float decay = record_decay[r * value_heads + lane.head];
        const float* const d = record_d + (r * value_heads + lane.head) * D + lane.column;
        const float* const k = record_k + (r * key_heads + key_head) * D + 2 * lane.t;
#pragma unroll
        for (int j = 0; j < D / 8; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                s[j][i] = fma_rn(k[8 * j + i % 2], d[i / 2 * 8], mul_rn(decay, s[j][i]));
        }
    }
}

// Converts two neighbouring accumulators to the left operand of a product over their columns.
DEVICE void as_left(const float (&x)[4], const float (&y)[4], u32 (&high)[4], u32 (&low)[4]) {
    split(x[0], x[1], high[0], low[0]);
    split(x[2], x[3], high[1], low[1]);
    split(y[0], y[1], high[2], low[2]);
    split(y[2], y[3], high[3], low[3]);
}

// Computes S^T K^T and S^T Q^T; their columns are the chunk's rows.
DEVICE void from_state(float (&in_k)[4][4], float (&in_q)[4][4], const float (&s)[D / 8][4],
                       saddr keys) {
#pragma unroll
    for (int j = 0; j < D / 8; j += 2) {
        u32 a_high[4], a_low[4], b_high[4], b_low[4];
        as_left(s[j], s[j + 1], a_high, a_low);
#pragma unroll
        for (int t = 0; t < 4; t += 2) {
            load_keys(b_high, b_low, keys, 8 * t, j);
            multiply(in_k[t], in_k[t + 1], a_high, a_low, b_high, b_low);
            load_keys(b_high, b_low, keys + 2 * KEY_PART, 8 * t, j);
            multiply(in_q[t], in_q[t + 1], a_high, a_low, b_high, b_low);
        }
    }
}

// out += x M^T for a lower triangular matrix M of the chunk.
DEVICE void through(float (&out)[4][4], const float (&x)[4][4], saddr matrix) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int s = 0; s < 4; s += 2) {
        u32 a_high[4], a_low[4], b_high[4], b_low[4];
        as_left(x[s], x[s + 1], a_high, a_low);
#pragma unroll
        for (int t = s; t < 4; t += 2) {
            const saddr at =
                matrix + matrix_at(8 * t + lane % 8 + lane / 16 * 8, s + lane / 8 % 2);
            load_matrix4(b_high, at);
            load_matrix4(b_low, at + MATRIX_PART);
            multiply(out[t], out[t + 1], a_high, a_low, b_high, b_low);
        }
    }
}

// S^T += d^T K.
DEVICE void into_state(float (&s)[D / 8][4], const float (&d)[4][4], saddr keys) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int t = 0; t < 4; t += 2) {
        u32 a_high[4], a_low[4], b_high[4], b_low[4];
        as_left(d[t], d[t + 1], a_high, a_low);
#pragma unroll
        for (int j = 0; j < D / 8; j += 2) {
            const saddr at = keys + key_at(8 * t + lane % 16, j + lane / 16);
            load_matrix4_transposed(b_high, at);
            load_matrix4_transposed(b_low, at + KEY_PART);
            multiply(s[j], s[j + 1], a_high, a_low, b_high, b_low);
        }
    }
}

// Runs one chunk: updates the state and sets o^T of its rows.
DEVICE void advance(float (&s)[D / 8][4], float (&o)[4][4], const u8* stage, const float* values) {
    const int t2 = threadIdx.x % 4 * 2;
    const saddr keys = shared_address(stage), matrices = keys + KEY_BYTES;
    const float* const gamma = reinterpret_cast<const float*>(stage + KEY_BYTES + GAMMA);
    const float* const fade = reinterpret_cast<const float*>(stage + KEY_BYTES + FADE);
    float rest[4][4] = {}, d[4][4] = {};
#pragma unroll
    for (int t = 0; t < 4; t++) o[t][0] = o[t][1] = o[t][2] = o[t][3] = 0.0f;
    from_state(rest, o, s, keys);
#pragma unroll
    for (int t = 0; t < 4; t++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = 8 * t + t2 + i % 2;
            rest[t][i] = values[row * VALUE_PITCH + i / 2 * 8] - gamma[row] * rest[t][i];
            o[t][i] *= gamma[row];
        }
    }
    through(d, rest, matrices);
    through(o, d, matrices + 2 * MATRIX_PART);
    const float last = gamma[CHUNK - 1];
#pragma unroll
    for (int j = 0; j < D / 8; j++) {
#pragma unroll
        for (int i = 0; i < 4; i++) s[j][i] *= last;
    }
#pragma unroll
    for (int t = 0; t < 4; t++) {
#pragma unroll
        for (int i = 0; i < 4; i++) d[t][i] *= fade[8 * t + t2 + i % 2];
    }
    into_state(s, d, keys);
}

// A value that depends on every load from the stage, for `received`: on those of K, T and the gates
// through the state, on those of Q and P through the rows' o, of which two blocks share a load.
DEVICE u32 last_of(const float (&s)[D / 8][4], const float (&o)[4][4]) {
    u32 x = float_bits(o[0][0]) ^ float_bits(o[2][0]);
#pragma unroll
    for (int j = 0; j < D / 8; j += 2) x ^= float_bits(s[j][0]);
    return x;
}

// Stores rows `first`.. of o [T, width], those below `end`; `at`: address of the lane's columns.
DEVICE void put_rows(u16* at, const float (&o)[4][4], int first, int end, i64 width) {
#pragma unroll
    for (int t = 0; t < 4; t++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = first + 8 * t + threadIdx.x % 4 * 2 + i % 2;
            if (row < end) at[row * width + i / 2 * 8] = float_bf16(o[t][i]);
        }
    }
}

// Starts copying chunk c into its stage. Called by one thread.
DEVICE void fetch(u8* memory, saddr barriers, int c, const u8* keys, int key_heads,
                  const u8* matrices, int value_heads) {
    const saddr to = shared_address(memory) + c % 2 * STAGE, barrier = barriers + c % 2 * 8;
    const i64 at = c;
    barrier_expect(barrier, STAGE);
    copy_bulk_kept(to, keys + at * key_heads * KEY_BYTES, KEY_BYTES, barrier);
    copy_bulk_kept(to + KEY_BYTES, matrices + at * value_heads * MATRIX_BYTES, MATRIX_BYTES,
                   barrier);
}

// Grid: value heads, slabs of a head's columns.
KERNEL void __launch_bounds__(THREADS)
gdn_prefill(const u16* qkv, const void* conv_weight, const i32* accepted, const i32* valid,
            const float* state, const u16* tail, const u16* record_qkv, const float* record_k,
            const float* record_d, const float* record_decay, const float* states,
            const i64* tail_shift, const i64* record_shift, const u8* keys, const u8* matrices,
            u16* o, float* next_state, int rows, int key_heads, int value_heads, int conv_f32) {
    DYNAMIC_SHARED(memory);  // two stages, the values, two barriers
    let_next_start();
    float* const values = reinterpret_cast<float*>(memory + 2 * STAGE);
    const saddr barriers = shared_address(values + CHUNK * VALUE_PITCH);
    const int warp = threadIdx.x / 32, head = blockIdx.x, start = blockIdx.y * SLAB;
    const int key_head = head / (value_heads / key_heads), n = *accepted;
    const Lane lane{head, start + warp * 16 + static_cast<int>(threadIdx.x) % 32 / 4,
                    static_cast<int>(threadIdx.x) % 4};
    const i64 record_by = shift_of(record_shift);
    move(tail, shift_of(tail_shift)), move(record_qkv, record_by), move(record_k, record_by);
    move(record_d, record_by), move(record_decay, record_by), move(states, record_by);
    const int channel = (2 * key_heads + head) * D + start + threadIdx.x % 32 * 2;
    const Taps taps = load_taps(conv_weight, channel, conv_f32);
    const Inputs x{qkv, tail, record_qkv, (2 * key_heads + value_heads) * D, n};
    if (threadIdx.x == 0) {
        barrier_init(barriers, 1);
        barrier_init(barriers + 8, 1);
        barrier_init_done();
    }
    float s[D / 8][4];
    const float* from = state;
    if (record_k == nullptr && n > 0)
        from = states + (n - 1) * static_cast<i64>(value_heads) * D * D;
#pragma unroll
    for (int j = 0; j < D / 8; j++) {
#pragma unroll
        for (int i = 0; i < 4; i++) s[j][i] = from[lane.state(j, i)];
    }
    if (record_k != nullptr)
        fold(s, lane, record_k, record_d, record_decay, n, key_heads, value_heads);
    sync_block();

    wait_for_previous();
    const int end = *valid, chunks = (end + CHUNK - 1) / CHUNK;
    const u8* const k_from = keys + static_cast<i64>(key_head) * KEY_BYTES;
    const u8* const m_from = matrices + static_cast<i64>(head) * MATRIX_BYTES;
    if (threadIdx.x == 0) {
        fetch(memory, barriers, 0, k_from, key_heads, m_from, value_heads);
        if (chunks > 1) fetch(memory, barriers, 1, k_from, key_heads, m_from, value_heads);
    }
    Window w;
    load_window(w, x, channel, warp * RUN, end);
    const i64 width = static_cast<i64>(value_heads) * D;
    u16* const out = o + static_cast<i64>(head) * D + lane.column;
    for (int c = 0; c < chunks; c++) {
        convolve_window(values + warp * RUN * VALUE_PITCH + threadIdx.x % 32 * 2, VALUE_PITCH, taps,
                        w);
        sync_block();
        if (c + 1 < chunks) load_window(w, x, channel, (c + 1) * CHUNK + warp * RUN, end);
        barrier_wait(barriers + c % 2 * 8, c / 2 % 2);
        float y[4][4];
        advance(s, y, memory + c % 2 * STAGE, values + warp * 16 + threadIdx.x % 32 / 4);
        put_rows(out, y, c * CHUNK, end, width);
        received(last_of(s, y));
        sync_block();
        if (threadIdx.x == 0 && c + 2 < chunks)
            fetch(memory, barriers, c + 2, k_from, key_heads, m_from, value_heads);
    }
#pragma unroll
    for (int j = 0; j < D / 8; j++) {
#pragma unroll
        for (int i = 0; i < 4; i++) next_state[lane.state(j, i)] = s[j][i];
    }
    for (int row = end + lane.t; row < rows; row += 4)
        out[row * width] = out[row * width + 8] = 0;
}
