// Small kernels for test_emulator.py: correct ones, and "wrong_..." ones with one mistake each.
#include "cuda/device.cuh"

// ---- right -----------------------------------------------------------------------------------
KERNEL void elements(const u32* in, u32* out) {
    u32 x = in[threadIdx.x], y = in[threadIdx.x + 32];
    float a = bits_float(x), b = bits_float(y);
    u32* to = out + 13 * threadIdx.x;
    to[0] = pack_bf16x2(a, b);
    to[1] = pack_f16x2(a, b);
    to[2] = pack_e4m3x2(a, b);
    to[3] = mul_bf16x2(x, y);
    to[4] = float_bits(f16x2_low(x));
    to[5] = float_bits(f16x2_high(x));
    e4m3x4_f16x4(x, to[6], to[7]);
    to[8] = rotate_right(x, 7);
    to[9] = select_bytes(x, y, 0x6420);
    to[10] = float_bits(bf16x2_low(x));
    to[11] = float_bits(bf16x2_high(x));
    to[12] = float_bits(fma_rn(a, b, a));
}

KERNEL void lanes(const u32* in, u32* out) {
    u32 x = in[threadIdx.x];
    int lane = static_cast<int>(threadIdx.x % 32);
    u32* to = out + 4 * threadIdx.x;
    to[0] = shuffle(x, (lane * 7 + 3) % 32);
    to[1] = shuffle_xor(x, 5);
    to[2] = ballot(x & 1u);
    to[3] = float_bits(shuffle_xor(bits_float(x), 16));
}

KERNEL void product(const u16* a, const u16* b, const float* c, float* d, int half) {
    // a [16, 16], b [16, 8], c and d [16, 8]
    int l = static_cast<int>(threadIdx.x), g = l / 4, t = 2 * (l % 4);
    auto pair = [](u16 x, u16 y) { return x | static_cast<u32>(y) << 16; };
    u32 fragment[4];
    for (int i = 0; i < 4; i++) {
        const u16* p = a + (g + 8 * (i & 1)) * 16 + t + 8 * (i >> 1);
        fragment[i] = pair(p[0], p[1]);
    }
    u32 b0 = pair(b[t * 8 + g], b[(t + 1) * 8 + g]);
    u32 b1 = pair(b[(t + 8) * 8 + g], b[(t + 9) * 8 + g]);
    float sum[4];
    for (int i = 0; i < 4; i++) sum[i] = c[(g + 8 * (i >> 1)) * 8 + t + (i & 1)];
    if (half) mma_f16(sum, fragment, b0, b1);
    else mma_bf16(sum, fragment, b0, b1);
    for (int i = 0; i < 4; i++) d[(g + 8 * (i >> 1)) * 8 + t + (i & 1)] = sum[i];
}

// in: four 8 x 8 matrices; out [lane, 8]: their fragments, then the fragments of the transposed ones.
KERNEL void matrices(const u16* in, u32* out) {
    __shared__ __align__(16) u16 tile[4 * 64];
    for (int i = static_cast<int>(threadIdx.x); i < 256; i += 32) tile[i] = in[i];
    sync_warp();
    u32 r[4], s[4];
    load_matrix4(r, shared_address(tile + 8 * threadIdx.x));
    load_matrix4_transposed(s, shared_address(tile + 8 * threadIdx.x));
    for (int i = 0; i < 4; i++) out[8 * threadIdx.x + i] = r[i], out[8 * threadIdx.x + 4 + i] = s[i];
}

// in, out: four 8 x 8 matrices.
KERNEL void matrices_back(const u16* in, u16* out) {
    __shared__ __align__(16) u16 tile[4 * 64], copy[4 * 64];
    for (int i = static_cast<int>(threadIdx.x); i < 256; i += 32) tile[i] = in[i];
    sync_warp();
    u32 r[4];
    load_matrix4(r, shared_address(tile + 8 * threadIdx.x));
    store_matrix4(shared_address(copy + 8 * threadIdx.x), r);
    sync_warp();
    for (int i = static_cast<int>(threadIdx.x); i < 256; i += 32) out[i] = copy[i];
}

// Two pairs of warps meet at a barrier each, twice. in, out [round, thread].
KERNEL void any_of_some(const u32* in, u32* out) {
    const int pair = static_cast<int>(threadIdx.x) / 64;
    for (int i = 0; i < 2; i++) {
        const int at = 128 * i + static_cast<int>(threadIdx.x);
        out[at] = sync_some_any(1 + pair, 64, in[at] != 0);
    }
}

// Adds up `parts` stages of 64 floats that go through a ring of 2 stages; one thread is the producer.
KERNEL void ring(const float* in, float* out, int parts) {
    DYNAMIC_SHARED(memory);
    float* stage = reinterpret_cast<float*>(memory);
    u64* barrier = reinterpret_cast<u64*>(memory + 512);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) {
            barrier_init(shared_address(barrier + i), 1);
            barrier_init(shared_address(barrier + 2 + i), 64);
        }
        barrier_init_done();
    }
    sync_block();
    if (threadIdx.x >= 64) {
        for (int i = 0; i < parts && threadIdx.x == 64; i++) {
            if (i >= 2) barrier_wait(shared_address(barrier + 2 + i % 2), (i / 2 - 1) & 1);
            barrier_expect(shared_address(barrier + i % 2), 256);
            copy_bulk(shared_address(stage + 64 * (i % 2)), in + 64 * i, 256,
                      shared_address(barrier + i % 2));
        }
        return;
    }
    float sum = 0;
    for (int i = 0; i < parts; i++) {
        barrier_wait(shared_address(barrier + i % 2), i / 2 & 1);
        sum += stage[64 * (i % 2) + threadIdx.x];
        received(float_bits(sum));
        barrier_arrive(shared_address(barrier + 2 + i % 2));
    }
    sync_some(1, 64);
    out[threadIdx.x] = sum;
}

// The same with asynchronous copies, of 16 bytes for each thread; groups past the end are zeros.
KERNEL void groups(const float* in, float* out, int parts) {
    DYNAMIC_SHARED(memory);
    float* stage = reinterpret_cast<float*>(memory) + 4 * threadIdx.x;
    auto fetch = [&](int i) {
        copy_async16(shared_address(stage + 128 * (i % 3)), in + 128 * i + 4 * threadIdx.x, i < parts);
        copy_async_commit();
    };
    fetch(0);
    fetch(1);
    float4 sum = make_float4(0, 0, 0, 0);
    for (int i = 0; i < parts + 1; i++) {
        copy_async_wait<1>();
        float4 x = *reinterpret_cast<float4*>(stage + 128 * (i % 3));
        sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
        received(float_bits(sum.x));
        fetch(i + 2);
    }
    copy_async_wait<0>();
    *reinterpret_cast<float4*>(out + 4 * threadIdx.x) = sum;
}

// The last block to arrive adds up what all blocks have written.
KERNEL void last_block(float* parts, u32* counter, float* out) {
    __shared__ u32 old;
    if (threadIdx.x == 0) {
        parts[blockIdx.x] = static_cast<float>(blockIdx.x + 1);
        old = arrive(counter);
    }
    sync_block();
    if (old + 1 != gridDim.x || threadIdx.x != 0) return;
    fence_device();
    float sum = 0;
    for (u32 i = 0; i < gridDim.x; i++) sum += load_shared_result(parts + i);
    out[0] = sum;
    *counter = 0;
}

// Warps that have ended do not count at sync_block.
KERNEL void early_exit(u32* out) {
    __shared__ u32 x;
    if (threadIdx.x >= 32) return;
    if (threadIdx.x == 0) x = 7;
    sync_block();
    out[threadIdx.x] = x;
}

KERNEL void waits(const u32* in, u32* out) {
    let_next_start();
    wait_for_previous();
    out[threadIdx.x] = in[threadIdx.x];
}

// ---- wrong -----------------------------------------------------------------------------------
KERNEL void wrong_no_sync(const u32* in, u32* out) {
    __shared__ u32 held[64];
    held[threadIdx.x] = in[threadIdx.x];
    out[threadIdx.x] = held[63 - threadIdx.x];
}

KERNEL void wrong_no_second_sync(const u32* in, u32* out) {
    __shared__ u32 held[64];
    u32 sum = 0;
    for (u32 i = 0; i < 2; i++) {
        held[threadIdx.x] = in[threadIdx.x] + i;
        sync_block();
        sum += held[63 - threadIdx.x];
    }
    out[threadIdx.x] = sum;
}

// Every thread writes a byte of its own; neighbours share a word. No race.
KERNEL void bytes_of_words(u32* out) {
    __shared__ u8 held[64];
    held[threadIdx.x] = static_cast<u8>(threadIdx.x);
    sync_block();
    if (threadIdx.x < 16) out[threadIdx.x] = reinterpret_cast<const u32*>(held)[threadIdx.x];
    sync_block();
    held[threadIdx.x ^ 1] = 0;
}

// A thread writes a word while one of another warp reads a byte of it.
KERNEL void wrong_byte_of_a_word(const u32* in, u32* out) {
    __shared__ u32 held[1];
    if (threadIdx.x == 0) held[0] = in[0];
    if (threadIdx.x == 32) out[0] = reinterpret_cast<const u8*>(held)[2];
}

KERNEL void wrong_word_of_bytes(const u32* in, u32* out) {
    __shared__ u32 held[16];
    reinterpret_cast<u8*>(held)[threadIdx.x] = static_cast<u8>(in[threadIdx.x]);
    out[threadIdx.x] = held[threadIdx.x / 4];
}

KERNEL void wrong_word_after_a_byte(const u32* in, u32* out) {
    __shared__ u32 held[1];
    if (threadIdx.x == 0) {
        reinterpret_cast<volatile u8*>(held)[1] = 3;
        held[0] = in[0];
    }
    if (threadIdx.x == 32) out[0] = held[0];
}

// Only the block in the middle lacks the barrier. Blocks before it use the same memory correctly.
KERNEL void wrong_in_one_block(const u32* in, u32* out) {
    __shared__ u32 held[64];
    held[threadIdx.x] = in[threadIdx.x];
    if (blockIdx.x != gridDim.x / 2) sync_block();
    out[64 * blockIdx.x + threadIdx.x] = held[63 - threadIdx.x];
}

KERNEL void wrong_no_warp_sync(const u32* in, u32* out) {
    __shared__ u32 held[32];
    held[threadIdx.x] = in[threadIdx.x];
    out[threadIdx.x] = held[31 - threadIdx.x];
}

KERNEL void wrong_no_init_sync(const u32* in, u32* out) {
    __shared__ u64 barrier;
    if (threadIdx.x == 0 || threadIdx.x == 63) {
        barrier_init(shared_address(&barrier), 64);
        barrier_init_done();
    }
    sync_warp();
    barrier_arrive(shared_address(&barrier));
    out[threadIdx.x] = in[threadIdx.x];
}

// The phase ends after `count` of 64 arrivals, when the other threads' words may not be written yet.
KERNEL void wrong_count(const u32* in, u32* out, int count) {
    __shared__ u64 barrier;
    __shared__ u32 held[64];
    if (threadIdx.x == 0) {
        barrier_init(shared_address(&barrier), count);
        barrier_init_done();
    }
    sync_block();
    held[threadIdx.x] = in[threadIdx.x];
    barrier_arrive(shared_address(&barrier));
    barrier_wait(shared_address(&barrier), 0);
    out[threadIdx.x] = held[63 - threadIdx.x];
}

// As `ring`, but the producer does not wait until a stage has been read.
KERNEL void wrong_no_release(const float* in, float* out) {
    DYNAMIC_SHARED(memory);
    float* stage = reinterpret_cast<float*>(memory);
    u64* barrier = reinterpret_cast<u64*>(memory + 512);
    if (threadIdx.x < 2) {
        barrier_init(shared_address(barrier + threadIdx.x), 1);
        barrier_init_done();
    }
    sync_block();
    for (int i = 0; i < 5; i++) {
        u64* full = barrier + i % 2;
        if (threadIdx.x == 64) {
            if (i >= 2) barrier_wait(shared_address(full), (i / 2 - 1) & 1);
            barrier_expect(shared_address(full), 256);
            copy_bulk(shared_address(stage + 64 * (i % 2)), in + 64 * i, 256, shared_address(full));
        } else if (threadIdx.x < 64) {
            barrier_wait(shared_address(full), i / 2 & 1);
            out[threadIdx.x] += stage[64 * (i % 2) + threadIdx.x];
        }
    }
}

// As `last_block`, but nothing orders what the block's other threads wrote before its arrival.
KERNEL void wrong_arrival(float* parts, u32* counter, float* out) {
    __shared__ u32 old;
    parts[blockIdx.x * blockDim.x + threadIdx.x] = 1.0f;
    if (threadIdx.x == 0) old = arrive(counter);
    sync_block();
    if (old + 1 != gridDim.x || threadIdx.x != 0) return;
    float sum = 0;
    for (u32 i = 0; i < gridDim.x * blockDim.x; i++) sum += load_shared_result(parts + i);
    out[0] = sum;
}

// Every block reads what its neighbour may not have written yet.
KERNEL void wrong_neighbour(float* parts, float* out) {
    parts[blockIdx.x] = 1.0f;
    out[blockIdx.x] = parts[(blockIdx.x + 1) % gridDim.x];
}

KERNEL void wrong_lanes_diverge(u32* out) {
    out[threadIdx.x] = threadIdx.x < 16 ? shuffle(1u, 0) : ballot(true);
}

KERNEL void wrong_lane_missing(u32* out) {
    if (threadIdx.x == 5) return;
    out[threadIdx.x] = shuffle_xor(1u, 1);
}

KERNEL void wrong_barrier_in_branch(u32* out) {
    if (threadIdx.x < 40) sync_block();
    else out[threadIdx.x] = ballot(true);
}

KERNEL void wrong_deadlock(u32* out) {
    if (threadIdx.x < 32) sync_some(1, 64);
    else sync_some(2, 64);
    out[threadIdx.x] = 1;
}

KERNEL void wrong_kinds_of_meeting(u32* out) {
    if (threadIdx.x < 32) sync_some(1, 64);
    else sync_some_any(1, 64, true);
    out[threadIdx.x] = 1;
}

KERNEL void wrong_wait_for_ever(u32* out) {
    __shared__ u64 barrier;
    if (threadIdx.x == 0) {
        barrier_init(shared_address(&barrier), 33);
        barrier_init_done();
    }
    sync_block();
    barrier_arrive(shared_address(&barrier));
    barrier_wait(shared_address(&barrier), 0);
}

KERNEL void wrong_arrivals(u32* out) {
    __shared__ u64 barrier;
    if (threadIdx.x == 0) {
        barrier_init(shared_address(&barrier), 2);
        barrier_init_done();
        barrier_expect(shared_address(&barrier), 16);
        barrier_arrive(shared_address(&barrier));
        barrier_arrive(shared_address(&barrier));
    }
}

// Two phases end in a row, so that threads that wait for the first one may miss its end.
KERNEL void wrong_two_phases(u32* out) {
    __shared__ u64 barrier;
    if (threadIdx.x == 0) {
        barrier_init(shared_address(&barrier), 32);
        barrier_init_done();
    }
    sync_block();
    if (threadIdx.x >= 32) return barrier_wait(shared_address(&barrier), 0);
    for (int i = 0; i < 2; i++) barrier_arrive(shared_address(&barrier));
}

// The second phase does not end before warp 1 has seen the end of the first, but may before warp 0
// has.
KERNEL void wrong_one_answer(u32* out) {
    __shared__ u64 barriers[2];
    const saddr phases = shared_address(&barriers[0]), answer = shared_address(&barriers[1]);
    const int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        barrier_init(phases, 32);
        barrier_init(answer, 32);
        barrier_init_done();
    }
    sync_block();
    if (warp == 2) {
        barrier_arrive(phases);
        barrier_wait(answer, 0);
        barrier_arrive(phases);
        return;
    }
    barrier_wait(phases, 0);
    if (warp == 1) barrier_arrive(answer);
    barrier_wait(phases, 1);
}

// All threads have synchronised, but the one that made the barrier has not called barrier_init_done.
KERNEL void wrong_no_init_done(u32* out) {
    __shared__ u64 barrier;
    if (threadIdx.x == 0) barrier_init(shared_address(&barrier), 32);
    sync_block();
    barrier_arrive(shared_address(&barrier));
    barrier_wait(shared_address(&barrier), 0);
    out[threadIdx.x] = 1;
}

KERNEL void wrong_no_init(u32* out) {
    __shared__ u64 barrier;
    barrier_arrive(shared_address(&barrier));
}

KERNEL void wrong_copy(const float* in, float* out, int bytes, int from, int wait) {
    DYNAMIC_SHARED(memory);
    u64* barrier = reinterpret_cast<u64*>(memory + 256);
    float* held = reinterpret_cast<float*>(memory);
    if (threadIdx.x == 0) {
        barrier_init(shared_address(barrier), 1);
        barrier_init_done();
        barrier_expect(shared_address(barrier), static_cast<u32>(bytes));
        copy_bulk(shared_address(memory), in + from, static_cast<u32>(bytes), shared_address(barrier));
    }
    sync_block();
    if (wait) barrier_wait(shared_address(barrier), 0);
    out[threadIdx.x] = held[threadIdx.x];
    barrier_wait(shared_address(barrier), 0);
}

KERNEL void wrong_async(const float* in, float* out, int wait) {
    DYNAMIC_SHARED(memory);
    float* held = reinterpret_cast<float*>(memory) + 4 * threadIdx.x;
    copy_async16(shared_address(held), in + 4 * threadIdx.x);
    copy_async_commit();
    if (wait) copy_async_wait<0>();
    else copy_async_wait<1>();
    for (int i = 0; i < 4; i++) out[4 * threadIdx.x + i] = held[i];
    copy_async_wait<0>();
}

// Thread `late` ends with a copy under way, of zeros or (`valid`) of words.
KERNEL void wrong_end(const float* in, int late, int valid) {
    DYNAMIC_SHARED(memory);
    copy_async16(shared_address(memory) + 16 * threadIdx.x, in + 4 * threadIdx.x, valid);
    copy_async_commit();
    if (static_cast<int>(threadIdx.x) != late) copy_async_wait<0>();
    copy_async_commit();
}

// A stage is read and then filled again, by the copy engine (`engine`) or by asynchronous copies. It
// is right with `receives` 1, and without `late`: every thread then calls `received` before the
// barrier after which the stage may be filled, and not only before the copy (late 2) or later (1).
// With `receives` 2 it waits for a constant instead of the load.
KERNEL void wrong_refill(const float* in, float* out, int engine, int receives, int late) {
    DYNAMIC_SHARED(memory);
    __shared__ u64 barrier[1];
    const float* held = reinterpret_cast<const float*>(memory) + threadIdx.x;
    const saddr to = shared_address(memory), full = shared_address(barrier);
    float sum = 0;
    if (threadIdx.x == 0) {
        barrier_init(full, 1);
        barrier_init_done();
    }
    sync_block();
    for (int round = 0; round < 2; round++) {
        if (engine && threadIdx.x == 0) {
            barrier_expect(full, 256);
            copy_bulk(to, in + 64 * round, 256, full);
        }
        if (!engine && threadIdx.x < 16) {
            copy_async16(to + 16 * threadIdx.x, in + 64 * round + 4 * threadIdx.x);
            copy_async_commit();
            copy_async_wait<0>();
        }
        if (engine) barrier_wait(full, round & 1);
        else sync_block();
        const float x = *held;
        if (receives == 1 && !late) received(float_bits(x));
        if (receives == 2) received(0);
        sync_block();
        sum += x;
        if (receives == 1 && (late == 2 || (late && round == 1))) received(float_bits(x));
    }
    out[threadIdx.x] = sum;
}

// Every thread clears a word, and the copy engine fills them all. It is right with `fenced`.
KERNEL void wrong_cleared(const float* in, float* out, int fenced) {
    DYNAMIC_SHARED(memory);
    __shared__ u64 barrier[1];
    float* held = reinterpret_cast<float*>(memory) + threadIdx.x;
    const saddr full = shared_address(barrier);
    *held = 0;
    if (threadIdx.x == 0) barrier_init(full, 1);
    if (threadIdx.x == 0 || fenced) barrier_init_done();
    sync_block();
    if (threadIdx.x == 0) {
        barrier_expect(full, 256);
        copy_bulk(shared_address(memory), in, 256, full);
    }
    barrier_wait(full, 0);
    out[threadIdx.x] = *held;
}

// Two copies fill a stage. One has a barrier of its own, for which thread 0 waits before it arrives at
// the stage's; the other is announced there before. It is right with `mistake` NONE_MADE.
enum { NONE_MADE, NOT_ANNOUNCED, NOT_WAITED, ANNOUNCED_LATE };

KERNEL void wrong_announced(const float* in, float* out, int mistake) {
    DYNAMIC_SHARED(memory);
    __shared__ u64 barriers[2];
    const saddr to = shared_address(memory), early = shared_address(&barriers[0]);
    const saddr full = shared_address(&barriers[1]);
    if (threadIdx.x == 0) {
        barrier_init(early, 1);
        barrier_init(full, 1);
        barrier_init_done();
        if (mistake != NOT_ANNOUNCED) barrier_announce(full, 128);
        copy_bulk(to + 128, in + 32, 128, full);
        barrier_expect(early, 128);
        copy_bulk(to, in, 128, early);
        if (mistake < NOT_WAITED) barrier_wait(early, 0);
        barrier_arrive(full);
        if (mistake == ANNOUNCED_LATE) barrier_announce(full, 16);
    }
    sync_block();
    barrier_wait(full, 0);
    out[threadIdx.x] = reinterpret_cast<const float*>(memory)[threadIdx.x];
    barrier_wait(early, 0);
}

KERNEL void wrong_index(const u32* in, u32* out, int where) { out[threadIdx.x] = in[where]; }
KERNEL void wrong_write(u32* in, u32* out, int where) {
    if (threadIdx.x == 0) in[0] = out[where];
}
KERNEL void same_word(u32* out) {
    if (threadIdx.x == 0) out[0] = 1;
}
KERNEL void wrong_shared(u32* out, int where) {
    DYNAMIC_SHARED(memory);
    out[threadIdx.x] = memory[where];
}
KERNEL void wrong_alignment(const u32* in, u32* out) {
    out[threadIdx.x] = reinterpret_cast<const uint2*>(in + 1)->x;
}
KERNEL void wrong_no_wait(const u32* in, u32* out) {
    out[threadIdx.x] = in[threadIdx.x];
    let_next_start();
    wait_for_previous();
}
// The block `silent` does not let the next kernel start.
KERNEL void wrong_no_let(int silent) {
    if (threadIdx.x == 5 && static_cast<int>(blockIdx.x) != silent) let_next_start();
    wait_for_previous();
}
// Lets the next kernel start before (`early`) or after it has requested all memory.
KERNEL void wrong_let(const float* in, int early) {
    DYNAMIC_SHARED(memory);
    if (early) let_next_start();
    copy_async16(shared_address(memory) + 16 * threadIdx.x, in + 4 * threadIdx.x);
    if (!early) let_next_start();
    wait_for_previous();
    copy_async_commit();
    copy_async_wait<0>();
}
KERNEL void wrong_recursion(u32* out, int where) {
    u32 big[8192];
    for (int i = 0; i < 8192; i++) big[i] = static_cast<u32>(i);
    for (int i = 0; i < where; i++) big[(i * 37) % 8192] += big[(i * 91) % 8192];
    out[threadIdx.x] = big[where % 8192];
}
