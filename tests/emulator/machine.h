// What kernels compiled for the emulator call. The emulated machine is a multiprocessor that runs one
// cluster at a time (often of a single block), with a fiber for each thread (machine.cpp). In a
// collective a fiber yields until all threads that must take part have arrived (lanes.cpp).
#pragma once

struct Index {
    unsigned x, y, z;
};
extern Index threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

typedef unsigned char u8;
typedef unsigned u32;
typedef unsigned long long u64;

constexpr int LARGEST_SHARED = 232448;
constexpr int GUARD = 4096;
// Dynamic shared memory starts 128 bytes past a multiple of 1024, so that a kernel that needs more
// than the 128-byte alignment it is promised fails.
constexpr int LEAD = 128;
extern u8 dynamic_memory[LEAD + LARGEST_SHARED + GUARD];
// An address in the cluster: rank + 1 in the bits from this one on, the address in that block below.
constexpr int RANK_SHIFT = 24;

// ---- collectives -----------------------------------------------------------------------------
void sync_block();
void sync_some(int id, int threads);
bool sync_some_any(int id, int threads, bool x);
void sync_warp();
u32 shuffle(u32 x, int lane);
u32 shuffle_xor(u32 x, int mask);
u32 ballot(bool x);
void load_matrix4(u32* r, u32 row, bool transposed);
void store_matrix4(u32 row, const u32* r);
void mma(float* d, const u32* a, u32 b0, u32 b1, bool half);

// ---- shared memory: an address is an offset from dynamic_memory ---------------------------------
u32 shared_address(const void* p);
void load_shared(void* to, u32 from, u32 bytes);
void store_shared16(u32 to, const void* value);
void copy_async16(u32 to, const void* from, bool valid);
void copy_async_commit();
void copy_async_wait(int left);
void barrier_init(u32 barrier, int count);
void barrier_init_done();
void barrier_expect(u32 barrier, u32 bytes);
void barrier_announce(u32 barrier, u32 bytes);
void barrier_arrive(u32 barrier);
void barrier_wait(u32 barrier, u32 parity);
void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier);
void prefetch(const void* from, u32 bytes);

// ---- clusters --------------------------------------------------------------------------------
u32 cluster_rank();
u32 cluster_size();
void cluster_arrive();
void cluster_arrive_relaxed();
void cluster_wait();
u32 cluster_address(u32 local, u32 rank);
void load_cluster16(void* to, u32 remote);
void store_cluster16(u32 remote, const void* value, u32 remote_barrier);
void received(u32 x);
void barrier_arrive_cluster(u32 remote_barrier);
void barrier_wait_cluster(u32 barrier, u32 parity);

// ---- between kernels and blocks --------------------------------------------------------------
void wait_for_previous();
void let_next_start();
u32 arrive(u32* counter);

// ---- launching -------------------------------------------------------------------------------
// A range of device memory that the kernel may access.
struct Range {
    u8* begin;
    u64 bytes;
    u32 flags;
};
// FROM_KERNELS: accessed only after wait_for_previous. READ_EARLY: except that reads may be earlier.
// COUNTED: every byte counts how many times it is prefetched.
enum { WRITABLE = 1, FROM_KERNELS = 2, READ_EARLY = 4, COUNTED = 8 };

// The stacks of all fibers, used by every launch of the process. Zero-initialised by the caller.
struct Stacks {
    u8* begin;
    u64 made;
};

constexpr u32 LATE = 1u << 16;
struct Launch {
    const char* kernel;
    u32 grid[3];
    int threads, shared;
    int cluster;  // blocks along x
    // Order of threads and blocks: 0 ascending, 1 descending; from LATE on ascending, but each
    // block's warp seed - LATE only runs when nothing else can go on; else pseudo-random.
    u32 seed;
    int ranges;
    const Range* memory;
    char* message;  // gets the description of a fault
    int message_bytes;
    Stacks* stacks;
};
// Runs a launch; returns 0, or 1 after a fault.
int run(const Launch& launch, void (*body)());

}  // namespace emulator
