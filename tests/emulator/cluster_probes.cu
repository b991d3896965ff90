// Kernels for test_clusters.py that can make several mistakes.
#include "cuda/device.cuh"

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
