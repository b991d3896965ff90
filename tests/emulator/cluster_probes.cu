// Small kernels for test_emulator_clusters.py: correct ones, and ones that can make several mistakes.
#include "cuda/device.cuh"

// ---- right -----------------------------------------------------------------------------------
// Every block has static and dynamic shared memory of its own.
KERNEL void own_memory(float* out) {
    DYNAMIC_SHARED(memory);
    __shared__ float fixed[32];
    float* moving = reinterpret_cast<float*>(memory);
    u32 i = threadIdx.x;
    float* kept = moving + (i + 1) % 32;
    fixed[i] = static_cast<float>(blockIdx.x);
    moving[i] = static_cast<float>(100 * blockIdx.x);
    for (int round = 0; round < 3; round++) {
        cluster_arrive();
        cluster_wait();
        fixed[i] += 1.0f;
    }
    sync_block();
    out[32 * blockIdx.x + i] = *kept + fixed[31 - i];
}

// Every block adds up 64 words of all blocks of its cluster, itself included, in order of rank. The
// words are stored by their owners or, with `loads`, loaded by the adder. out [block, 64].
KERNEL void exchange(const float* in, float* out, int loads, int rounds) {
    DYNAMIC_SHARED(memory);
    u32 rank = cluster_rank(), size = cluster_size(), i = threadIdx.x;
    float* own = reinterpret_cast<float*>(memory);            // [64]
    float* parts = reinterpret_cast<float*>(memory) + 64;     // [size, 64]
    saddr barrier = shared_address(memory + 256 * (1 + size));
    if (i == 0) {
        barrier_init(barrier, 1);
        barrier_init_done();
    }
    cluster_arrive_relaxed();
    cluster_wait();
    float sum = 0;
    for (int round = 0; round < rounds; round++) {
        if (i == 0) barrier_expect(barrier, loads ? 0 : 256 * size);
        own[i] = in[64 * blockIdx.x + i] + static_cast<float>(round);
        if (loads) {
            cluster_arrive();
            cluster_wait();
        } else {
            sync_block();
        }
        for (u32 to = 0; to < size; to++) {
            u32 there = cluster_address(barrier, to);
            u32 place = cluster_address(shared_address(parts + 64 * rank), to);
            if (!loads && i < 16) {
                float4 x = *reinterpret_cast<float4*>(own + 4 * i);
                store_cluster16(place + 16 * i, x, there);
            }
            if (loads && i < 16) {
                float4 x = load_cluster16(cluster_address(shared_address(own + 4 * i), to));
                *reinterpret_cast<float4*>(parts + 64 * to + 4 * i) = x;
            }
        }
        if (loads) sync_block();
        else barrier_wait_cluster(barrier, round & 1);
        for (u32 from = 0; from < size; from++) sum += parts[64 * from + i];
        received(float_bits(sum));
        cluster_arrive();
        cluster_wait();
    }
    out[64 * blockIdx.x + i] = sum;
}

// The first block stores one stage after another in all other blocks, which arrive at its barrier when
// they have read a stage.
KERNEL void feed(const float* in, float* out, int parts) {
    __shared__ __align__(16) float stage[64];
    __shared__ u64 barriers[2];
    saddr full = shared_address(barriers), empty = shared_address(barriers + 1);
    u32 rank = cluster_rank(), i = threadIdx.x;
    if (i == 0) {
        barrier_init(full, 1);
        barrier_init(empty, 64 * static_cast<int>(cluster_size() - 1));
        barrier_init_done();
    }
    cluster_arrive_relaxed();
    cluster_wait();
    float sum = 0;
    for (int part = 0; part < parts; part++) {
        if (rank == 0) {
            if (part > 0) barrier_wait_cluster(empty, (part - 1) & 1);
            for (u32 to = 1; to < cluster_size() && i < 16; to++) {
                float4 x = *reinterpret_cast<const float4*>(in + 64 * part + 4 * i);
                store_cluster16(cluster_address(shared_address(stage + 4 * i), to), x,
                                cluster_address(full, to));
            }
        } else {
            if (i == 0) barrier_expect(full, 256);
            barrier_wait_cluster(full, part & 1);
            sum += stage[i];
            received(float_bits(sum));
            barrier_arrive_cluster(cluster_address(empty, 0));
        }
    }
    if (rank == 0) barrier_wait_cluster(empty, (parts - 1) & 1);
    out[64 * blockIdx.x + i] = sum;
}

// A block stores words in itself and in the next block. They may arrive before their barriers'
// barrier_expect.
KERNEL void unannounced(const float* in, float* out) {
    __shared__ __align__(16) float words[64];
    __shared__ u64 barriers[2];
    u32 rank = cluster_rank(), i = threadIdx.x;
    saddr first = shared_address(barriers), second = shared_address(barriers + 1);
    if (i == 0) {
        barrier_init(first, 1);
        barrier_init(second, 1);
        barrier_init_done();
    }
    cluster_arrive_relaxed();
    cluster_wait();
    if (i < 16) {
        u32 to = i < 8 ? rank : (rank + 1) % cluster_size();
        float4 x = reinterpret_cast<const float4*>(in)[i];
        store_cluster16(cluster_address(shared_address(words + 4 * i), to), x,
                        cluster_address(first, to));
        store_cluster16(cluster_address(shared_address(words + 4 * i), to), x,
                        cluster_address(second, to));
    }
    if (i == 0) {
        barrier_expect(second, 256);
        barrier_wait_cluster(second, 0);
        barrier_expect(first, 256);
    }
    barrier_wait_cluster(first, 0);
    barrier_wait_cluster(second, 0);
    out[64 * blockIdx.x + i] = words[i];
}

// ---- wrong -----------------------------------------------------------------------------------
// Every block reads what its neighbour has written. With `mistake` 0 (NONE) the kernels are correct.
enum { NONE, NO_START, NO_END, NO_INIT_DONE, NO_EXPECT, RELAXED, OVERWRITE, WRONG_WAIT,
       NO_WAIT, TWO_ARRIVALS, NO_ARRIVAL, ENDS_EARLY, FAR_BARRIER, BEHIND, LOCAL, TOO_MUCH,
       NO_SYNC, APART };

// Loads the next block's words after a barrier of the cluster.
KERNEL void wrong_load(const float* in, float* out, int mistake) {
    DYNAMIC_SHARED(memory);
    float* held = reinterpret_cast<float*>(memory);
    u32 i = threadIdx.x, next = (cluster_rank() + 1) % cluster_size();
    held[i] = in[64 * blockIdx.x + i];
    if (mistake == NO_ARRIVAL) cluster_wait();
    if (mistake == APART && i % 2) ballot(true);
    if (mistake == RELAXED) cluster_arrive_relaxed();
    else if (mistake != NO_START) cluster_arrive();
    if (mistake == TWO_ARRIVALS) cluster_arrive();
    if (mistake == ENDS_EARLY && i == 5) return;
    if (mistake != NO_START) cluster_wait();
    u32 words = shared_address(held + 4 * (i % 16));
    u32 there = mistake == LOCAL ? words : cluster_address(words, next);
    if (mistake == BEHIND) there += 256;
    float4 x = load_cluster16(there);
    if (mistake == OVERWRITE) held[i] = 0;
    if (mistake != NO_END) {
        cluster_arrive();
        cluster_wait();
    }
    out[64 * blockIdx.x + i] = x.x + x.y + x.z + x.w;
}

// Stores words in the next block, which waits for them.
KERNEL void wrong_send(const float* in, float* out, int mistake) {
    DYNAMIC_SHARED(memory);
    float* held = reinterpret_cast<float*>(memory);
    float* got = held + 64;
    saddr barrier = shared_address(memory + 512);
    u32 i = threadIdx.x, next = (cluster_rank() + 1) % cluster_size();
    if (i == 0) {
        barrier_init(barrier, 1);
        if (mistake != NO_INIT_DONE) barrier_init_done();
        if (mistake != NO_EXPECT) barrier_expect(barrier, mistake == TOO_MUCH ? 240 : 256);
    }
    if (mistake != NO_START) {
        cluster_arrive();
        cluster_wait();
    }
    held[i] = in[64 * blockIdx.x + i];
    if (mistake != NO_SYNC) sync_block();
    u32 there = cluster_address(barrier, mistake == FAR_BARRIER ? cluster_rank() : next);
    u32 place = cluster_address(shared_address(got), next);
    if (i < 16) {
        store_cluster16(place + 16 * i, *reinterpret_cast<float4*>(held + 4 * i), there);
    }
    if (mistake == OVERWRITE) {
        sync_block();
        held[i] = 0;
    }
    if (mistake == WRONG_WAIT) barrier_wait(barrier, 0);
    else if (mistake != NO_WAIT) barrier_wait_cluster(barrier, 0);
    out[64 * blockIdx.x + i] = got[i];
}

// Loads from the next block, then arrives at its barrier, so that it may overwrite what was read.
KERNEL void wrong_release(float* out, int mistake) {
    __shared__ __align__(16) float held[4];
    __shared__ u64 barrier;
    u32 i = threadIdx.x, next = (cluster_rank() + 1) % cluster_size();
    if (i < 4) held[i] = 1.0f;
    if (i == 0) {
        barrier_init(shared_address(&barrier), 32);
        if (mistake != NO_INIT_DONE) barrier_init_done();
    }
    cluster_arrive();
    cluster_wait();
    float4 x = load_cluster16(cluster_address(shared_address(held), next));
    barrier_arrive_cluster(cluster_address(shared_address(&barrier), next));
    if (mistake == WRONG_WAIT) barrier_wait(shared_address(&barrier), 0);
    else if (mistake != NO_WAIT && mistake != NO_END) barrier_wait_cluster(shared_address(&barrier), 0);
    if (i < 4 && mistake != NO_END) held[i] = 2.0f;
    out[32 * blockIdx.x + i] = x.x;
}

// All other blocks load from the first one, which may end before or after their loads.
KERNEL void wrong_one_sided(float* out, int mistake) {
    __shared__ __align__(16) float held[4];
    if (threadIdx.x < 4) held[threadIdx.x] = 1.0f;
    cluster_arrive();
    cluster_wait();
    float4 x = make_float4(0, 0, 0, 0);
    if (cluster_rank() > 0) x = load_cluster16(cluster_address(shared_address(held), 0));
    if (mistake == RELAXED) cluster_arrive_relaxed();
    else if (mistake != NO_END) cluster_arrive();
    if (mistake != NO_END) cluster_wait();
    out[32 * blockIdx.x + threadIdx.x] = x.w;
}
