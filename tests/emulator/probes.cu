// Small kernels for test_emulator.py: correct ones, and "wrong_..." ones with one mistake each.
#include "cuda/device.cuh"

// ---- right -----------------------------------------------------------------------------------
KERNEL void elements(const u32* in, u32* out) {
    u32 x = in[threadIdx.x], y = in[threadIdx.x + 32];
    float a = bits_float(x), b = bits_float(y);
    u32* to = out + 3 * threadIdx.x;
    to[0] = pack_bf16x2(a, b);
    to[1] = pack_f16x2(a, b);
    to[2] = pack_e4m3x2(a, b);
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

// ---- wrong -----------------------------------------------------------------------------------
KERNEL void wrong_no_sync(const u32* in, u32* out) {
    __shared__ u32 held[64];
    held[threadIdx.x] = in[threadIdx.x];
    out[threadIdx.x] = held[63 - threadIdx.x];
}

// A thread writes a word while one of another warp reads a byte of it.
KERNEL void wrong_byte_of_a_word(const u32* in, u32* out) {
    __shared__ u32 held[1];
    if (threadIdx.x == 0) held[0] = in[0];
    if (threadIdx.x == 32) out[0] = reinterpret_cast<const u8*>(held)[2];
}

KERNEL void wrong_no_warp_sync(const u32* in, u32* out) {
    __shared__ u32 held[32];
    held[threadIdx.x] = in[threadIdx.x];
    out[threadIdx.x] = held[31 - threadIdx.x];
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

KERNEL void wrong_deadlock(u32* out) {
    if (threadIdx.x < 32) sync_some(1, 64);
    else sync_some(2, 64);
    out[threadIdx.x] = 1;
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

// All threads have synchronised, but the one that made the barrier has not called barrier_init_done.
KERNEL void wrong_no_init_done(u32* out) {
    __shared__ u64 barrier;
    if (threadIdx.x == 0) barrier_init(shared_address(&barrier), 32);
    sync_block();
    barrier_arrive(shared_address(&barrier));
    barrier_wait(shared_address(&barrier), 0);
    out[threadIdx.x] = 1;
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
KERNEL void wrong_no_wait(const u32* in, u32* out) {
    out[threadIdx.x] = in[threadIdx.x];
    let_next_start();
    wait_for_previous();
}
