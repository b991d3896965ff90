// Computes the matrices of a prefill's chunks (chunk.cuh), a block those of one chunk and key head.
#include "gdn/chunk.cuh"

constexpr int DOT_PITCH = CHUNK + 1;

DEVICE float warp_sum(float x) {
#pragma unroll
    for (int mask = 16; mask; mask /= 2) x = add_rn(x, shuffle_xor(x, mask));
    return x;
}

DEVICE void put_split(u8* image, int row, int lane, float4 x) {
    uint2 high, low;
    split(x.x, x.y, high.x, low.x);
    split(x.z, x.w, high.y, low.y);
    u8* const at = image + key_at(row, lane / 2) + lane % 2 * 8;
    *reinterpret_cast<uint2*>(at) = high;
    *reinterpret_cast<uint2*>(at + KEY_PART) = low;
}

// Scales q and k, float32 [CHUNK][D] each, to unit length and writes them to the image.
DEVICE void normalise(u8* image, const float4* k, const float4* q) {
    const int lane = threadIdx.x % 32;
    for (int t = threadIdx.x / 32; t < CHUNK; t += WARPS) {
        const float4 key = k[t * (D / 4) + lane], query = q[t * (D / 4) + lane];
        const float k_norm = sqrtf(warp_sum(dot4(key, key)) + NORM_EPSILON);
        const float q_norm = sqrtf(warp_sum(dot4(query, query)) + NORM_EPSILON);
        put_split(image, t, lane, scaled4(key, 1.0f / k_norm));
        put_split(image + 2 * KEY_PART, t, lane, scaled4(query, QUERY_SCALE / q_norm));
    }
}

// dots[t][s] = k_t . k_s, dots[32 + t][s] = q_t . k_s. Each warp computes 16 rows.
DEVICE void dot_products(float* dots, saddr image) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const saddr left = image + warp / 2 * 2 * KEY_PART;
    float d[CHUNK / 8][4] = {};
#pragma unroll
    for (int piece = 0; piece < D / 8; piece += 2) {
        u32 a_high[4], a_low[4];
        const saddr at = left + key_at(warp % 2 * 16 + lane % 16, piece + lane / 16);
        load_matrix4(a_high, at);
        load_matrix4(a_low, at + KEY_PART);
#pragma unroll
        for (int s = 0; s < CHUNK / 8; s += 2) {
            u32 b_high[4], b_low[4];
            load_keys(b_high, b_low, image, 8 * s, piece);
            multiply(d[s], d[s + 1], a_high, a_low, b_high, b_low);
        }
    }
#pragma unroll
    for (int s = 0; s < CHUNK / 8; s++) {
        float* const to = dots + (16 * warp + lane / 4) * DOT_PITCH + 8 * s + lane % 4 * 2;
        to[0] = d[s][0], to[1] = d[s][1];
        to[8 * DOT_PITCH] = d[s][2], to[8 * DOT_PITCH + 1] = d[s][3];
    }
}

DEVICE void put_element(u8* matrix, int row, int column, float x) {
    u32 high, low;
    split(x, 0.0f, high, low);
    u8* const at = matrix + matrix_at(row, column / 8) + column % 8 * 2;
    *reinterpret_cast<u16*>(at) = static_cast<u16>(high);
    *reinterpret_cast<u16*>(at + MATRIX_PART) = static_cast<u16>(low);
}

// Computes T, P, gamma and L[last] of one value head. Called by one warp; lane s has column s.
DEVICE void solve(u8* matrices, const float* dots, float decay, float beta) {
    const int lane = threadIdx.x % 32;
    float inverse[CHUNK];  // column `lane` of (I + ...)^-1
    float fade = 0.0f, gamma = 1.0f, mine = 0.0f;
#pragma unroll
    for (int t = 0; t < CHUNK; t++) {
        const float decay_t = shuffle(decay, t), beta_t = shuffle(beta, t);
        fade = lane == t ? 1.0f : fade * decay_t;  // L[t][lane]
        gamma *= decay_t;
        mine = lane == t ? gamma : mine;
        const float below = lane < t ? beta_t * fade * dots[t * DOT_PITCH + lane] : 0.0f;
        float x = lane == t ? 1.0f : 0.0f;
#pragma unroll
        for (int s = 0; s < t; s++) x = fma_rn(-shuffle(below, s), inverse[s], x);
        inverse[t] = x;
        put_element(matrices, t, lane, x * beta);
        const float p = lane <= t ? fade * dots[(CHUNK + t) * DOT_PITCH + lane] : 0.0f;
        put_element(matrices + 2 * MATRIX_PART, t, lane, p);
    }
    reinterpret_cast<float*>(matrices + GAMMA)[lane] = mine;
    reinterpret_cast<float*>(matrices + FADE)[lane] = fade;
}

// Writes next_tail for the channels of the key head: the three inputs before row `end`.
DEVICE void keep_tail(u16* next_tail, const Inputs& x, int end, int key_heads, int ratio) {
    const int pairs = (2 + ratio) * (D / 2);
    for (int i = threadIdx.x; i < pairs * (TAPS - 1); i += THREADS) {
        const int j = i / pairs, pair = i % pairs, part = pair / (D / 2);
        const int head = part < 2 ? part * key_heads + blockIdx.x
                                  : 2 * key_heads + blockIdx.x * ratio + part - 2;
        const int channel = head * D + pair % (D / 2) * 2;
        *reinterpret_cast<u32*>(next_tail + j * x.channels + channel) =
            x.pair(end - (TAPS - 1) + j, channel);
    }
}

// Grid: key heads, chunks. keys [chunks][Hk][KEY_BYTES], matrices [chunks][Hv][MATRIX_BYTES].
KERNEL void __launch_bounds__(THREADS)
gdn_chunks(const u16* qkv, const u16* b, const u16* a, const void* conv_weight, const void* a_log,
           const void* dt_bias, const i32* accepted, const i32* valid, const u16* tail,
           const u16* record_qkv, u16* next_tail, const i64* tail_shift, const i64* record_shift,
           u8* keys, u8* matrices, int key_heads, int value_heads, int conv_f32, int a_log_f32,
           int dt_bias_f32) {
    DYNAMIC_SHARED(image);  // KEY_BYTES, then k and q in float32, later the dot products
    let_next_start();
    float* const k = reinterpret_cast<float*>(image + KEY_BYTES);
    float* const q = k + CHUNK * D;
    const int key_head = blockIdx.x, chunk = blockIdx.y, first = chunk * CHUNK;
    const int ratio = value_heads / key_heads;
    const int pair = threadIdx.x % (D / 2) * 2;
    const bool key = threadIdx.x < D / 2;
    const int channel = ((key ? key_heads : 0) + key_head) * D + pair;
    const Taps taps = load_taps(conv_weight, channel, conv_f32);

    const i64 tail_by = shift_of(tail_shift);
    move(tail, tail_by), move(next_tail, -tail_by);
    move(record_qkv, shift_of(record_shift));

    wait_for_previous();
    const int end = *valid;
    const Inputs x{qkv, tail, record_qkv, (2 * key_heads + value_heads) * D, *accepted};
    if (chunk == 0) keep_tail(next_tail, x, end, key_heads, ratio);
    if (first >= end) return;
#pragma unroll 1
    for (int t = 0; t < CHUNK; t += RUN) {
        Window w;
        load_window(w, x, channel, first + t, end);
        convolve_window((key ? k : q) + t * D + pair, D, taps, w);
    }
    sync_block();
    normalise(image, reinterpret_cast<const float4*>(k), reinterpret_cast<const float4*>(q));
    sync_block();
    uint4* const to = reinterpret_cast<uint4*>(
        keys + (static_cast<i64>(chunk) * key_heads + key_head) * KEY_BYTES);
    for (int i = threadIdx.x; i < KEY_BYTES / 16; i += THREADS)
        to[i] = reinterpret_cast<const uint4*>(image)[i];
    dot_products(k, shared_address(image));
    sync_block();
    for (int slot = threadIdx.x / 32; slot < ratio; slot += WARPS) {
        const int head = key_head * ratio + slot, row = first + threadIdx.x % 32;
        const i64 at = static_cast<i64>(row) * value_heads + head;
        float decay = 1.0f, beta = 0.0f;  // leave the state unchanged
        if (row < end) {
            decay = decay_gate(bf16_float(a[at]), plain(a_log, head, a_log_f32),
                               plain(dt_bias, head, dt_bias_f32));
            beta = sigmoid(bf16_float(b[at]));
        }
        solve(matrices + (static_cast<i64>(chunk) * value_heads + head) * MATRIX_BYTES, k, decay,
              beta);
    }
}
