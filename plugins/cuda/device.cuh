// The device functions that kernels share: element types, warp and block operations, copies, matrix
// products. Plain sm_90 and sm_110, with no other header, so that NVRTC needs no include path.
// Kernels contain no inline assembly: all of it is here, so that an emulator can provide the same
// functions without the hardware (tests/emulator/cuda runs the kernels on a CPU).
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

#define KERNEL extern "C" __global__
#define DEVICE __device__ __forceinline__
// Between KERNEL void and the name of a kernel that is always launched in clusters of n blocks.
#define CLUSTERS_OF(n) __cluster_dims__(n, 1, 1)
// The launch's dynamic shared memory, 128-byte aligned.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) u8 name[]

constexpr u32 ALL_LANES = 0xffffffffu;

// ---- element types -------------------------------------------------------------------------
// bf16 and fp8 values are held as bits: u16 and u8, pairs in a u32 (first element in the low half).

DEVICE float bits_float(u32 x) { return __uint_as_float(x); }
DEVICE u32 float_bits(float x) { return __float_as_uint(x); }

DEVICE float bf16_float(u16 x) { return bits_float(static_cast<u32>(x) << 16); }
DEVICE float bf16x2_low(u32 x) { return bits_float(x << 16); }
DEVICE float bf16x2_high(u32 x) { return bits_float(x & 0xffff0000u); }

// Round to nearest even.
DEVICE u32 pack_bf16x2(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
DEVICE u16 float_bf16(float x) { return static_cast<u16>(pack_bf16x2(x, 0.0f) & 0xffffu); }

// One rounding; subnormal operands are not flushed.
DEVICE u32 mul_bf16x2(u32 a, u32 b) {
    u32 r;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

// The low (or high) half of x, in both halves. Free as an operand of mul_bf16x2.
DEVICE u32 twice_low(u32 x) {
    u32 r;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l};}" : "=r"(r) : "r"(x));
    return r;
}
DEVICE u32 twice_high(u32 x) {
    u32 r;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h};}" : "=r"(r) : "r"(x));
    return r;
}

DEVICE u32 pack_f16x2(float low, float high) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
DEVICE float f16x2_low(u32 x) {
    float r;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(r) : "r"(x));
    return r;
}
DEVICE float f16x2_high(u32 x) {
    float r;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(r) : "r"(x));
    return r;
}

// E4M3 (fn): rounds to nearest even, saturates beyond 448, keeps NaN.
DEVICE u16 pack_e4m3x2(float low, float high) {
    u16 r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
    return r;
}
// The two pairs of a word, low then high; exact.
DEVICE void e4m3x4_f16x4(u32 x, u32& low, u32& high) {
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2;"
        " cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}"
        : "=r"(low), "=r"(high) : "r"(x));
}

// x as a value that the compiler cannot know, so that it stays in a register instead of becoming an
// immediate at every use. blockDim.z is always 1.
DEVICE u32 opaque(u32 x) { return x + (blockDim.z - 1); }

// Waits until x has been loaded. A load instruction only starts a load: neither a barrier nor an
// arrival waits for results that are not used yet, and an asynchronous copy that they release can
// overwrite bytes that are still to be read (seen on an H100: about one load in 10^9). So for every
// load whose source may be overwritten afterwards, a word of the result, or of a value computed
// from it, is passed here first; several are combined by ^. blockDim.z is always 1, so nothing ever
// sleeps.
DEVICE void received(u32 x) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %0, 0; @p nanosleep.u32 1;}"
                 ::"r"(x & (blockDim.z - 1)) : "memory");
}

DEVICE u32 rotate_right(u32 x, int n) { return __funnelshift_r(x, x, n); }
// Four bytes of {b, a} (b high), chosen by the nibbles of `selector`.
DEVICE u32 select_bytes(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }

// ---- float32 arithmetic that the compiler must not rearrange or contract ---------------------
DEVICE float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE float mul_rn(float a, float b) { return __fmul_rn(a, b); }
DEVICE float add_rn(float a, float b) { return __fadd_rn(a, b); }
// 2^x to 2 units in the last place; 1 at 0, 0 below 2^-126.
DEVICE float exp2_approx(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
// 1 / x to 1 unit in the last place; 0 where that is below 2^-126.
DEVICE float reciprocal_approx(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// ---- lanes, warps, blocks --------------------------------------------------------------------
DEVICE void sync_block() { __syncthreads(); }
DEVICE void sync_warp() { __syncwarp(); }
// Synchronises `threads` threads of the block (whole warps) at barrier `id`, 1..15.
DEVICE void sync_some(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// The same; returns whether x is true for any of them.
DEVICE bool sync_some_any(int id, int threads, bool x) {
    u32 any;
    asm volatile("{.reg .pred p, q; setp.ne.u32 p, %3, 0; bar.red.or.pred q, %1, %2, p;"
                 " selp.u32 %0, 1, 0, q;}"
                 : "=r"(any) : "r"(id), "r"(threads), "r"(static_cast<u32>(x)) : "memory");
    return any != 0;
}
// All 32 lanes must take part in each of these.
DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(ALL_LANES, x, mask); }
DEVICE i32 shuffle_xor(i32 x, int mask) { return __shfl_xor_sync(ALL_LANES, x, mask); }
DEVICE u32 shuffle_xor(u32 x, int mask) { return __shfl_xor_sync(ALL_LANES, x, mask); }
DEVICE float shuffle(float x, int lane) { return __shfl_sync(ALL_LANES, x, lane); }
DEVICE i32 shuffle(i32 x, int lane) { return __shfl_sync(ALL_LANES, x, lane); }
DEVICE u32 shuffle(u32 x, int lane) { return __shfl_sync(ALL_LANES, x, lane); }
// x, passed through a shuffle so that the compiler keeps it in a register; it would recompute a
// cheap expression at every use.
DEVICE u32 kept(u32 x) { return shuffle(x, threadIdx.x % 32); }
DEVICE u32 ballot(bool x) { return __ballot_sync(ALL_LANES, x); }

// ---- one kernel and the next (programmatic dependent launch) ---------------------------------
// Everything that earlier kernels of the stream wrote is visible after this. Every kernel calls it,
// in each thread that accesses memory shared with another kernel, before that access. What may be
// read earlier: docs/design/cuda.md.
DEVICE void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// The next kernel may start now; its wait_for_previous still covers this kernel's later writes.
DEVICE void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// ---- between blocks --------------------------------------------------------------------------
// Adds 1 and returns the old value. Everything this thread wrote (and, after sync_block, this
// block) is visible to a thread that sees the new value and then fences.
DEVICE u32 arrive(u32* counter) {
    u32 old;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;"
                 : "=r"(old) : "l"(counter) : "memory");
    return old;
}
DEVICE void fence_device() { __threadfence(); }

// ---- loads that bypass a cache ---------------------------------------------------------------
// Loads data written by another block of this launch, or read before wait_for_previous: bypasses
// this multiprocessor's L1 cache, which does not see other multiprocessors' writes.
DEVICE float4 load_shared_result(const float4* p) { return __ldcg(p); }
DEVICE uint4 load_shared_result(const uint4* p) { return __ldcg(p); }
DEVICE float load_shared_result(const float* p) { return __ldcg(p); }
DEVICE u32 load_shared_result(const u32* p) { return __ldcg(p); }

// Loads constant data now; the compiler may delay an ordinary load until its result is used. Word
// by word, because the compiler would wait for a vector in order to move it to other registers.
DEVICE int4 load_now(const int4* p) {
    int4 r;
    asm volatile("ld.global.nc.s32 %0, [%4]; ld.global.nc.s32 %1, [%4 + 4];"
                 " ld.global.nc.s32 %2, [%4 + 8]; ld.global.nc.s32 %3, [%4 + 12];"
                 : "=&r"(r.x), "=&r"(r.y), "=&r"(r.z), "=&r"(r.w) : "l"(p));
    return r;
}

// ---- shared memory by address ----------------------------------------------------------------
typedef u32 saddr;
DEVICE saddr shared_address(const void* p) {
    return static_cast<u32>(__cvta_generic_to_shared(p));
}

// Copies 16 bytes global -> shared, asynchronously; copies complete in order of commits.
DEVICE void copy_async16(saddr to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// The same, or 16 zero bytes where `valid` is false (`from` is not read then).
DEVICE void copy_async16(saddr to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most N of this thread's commits are outstanding.
template <int N> DEVICE void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// A transaction barrier in shared memory: u64, 8-byte aligned. A phase ends when `count` threads
// have arrived and all announced bytes have been written.
DEVICE void barrier_init(saddr barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// Called after the inits by the thread that made them; synchronise before any use.
DEVICE void barrier_init_done() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Arrives once and announces `bytes` of bulk copies.
DEVICE void barrier_expect(saddr barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 ::"r"(barrier), "r"(bytes) : "memory");
}
// Announces bytes without arriving: the phase cannot end before an arrival that is still missing.
DEVICE void barrier_announce(saddr barrier, u32 bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;"
                 ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void barrier_arrive(saddr barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// `received` and barrier_arrive in one: the address depends on `x`, so that the arrival is not
// issued before the loads that x depends on have returned. blockDim.z is always 1, so x adds
// nothing.
DEVICE void barrier_arrive_received(saddr barrier, u32 x) {
    barrier_arrive(barrier + (x & (blockDim.z - 1)));
}
// Waits until the phase of this parity (0 first, then 1, 0, ...) has ended.
DEVICE void barrier_wait(saddr barrier, u32 parity) {
    asm volatile("{.reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;"
                 " @!p bra again;}" ::"r"(barrier), "r"(parity) : "memory");
}
// Copies `bytes` (a multiple of 16, both addresses 16-byte aligned) global -> shared by the copy
// engine; completion is counted on `barrier`. For data read once: the L2 cache evicts it first.
DEVICE void copy_bulk(saddr to, const void* from, u32 bytes, saddr barrier) {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1], %2, [%3], %4;"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}
// The same for data that other blocks read too: cached normally in L2.
DEVICE void copy_bulk_kept(saddr to, const void* from, u32 bytes, saddr barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// Prefetches `bytes` (a multiple of 16, from a 16-byte aligned address on) into the L2 cache.
DEVICE void prefetch_bulk(const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

DEVICE u32 load_shared4(saddr p) {
    u32 r;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(r) : "r"(p));
    return r;
}
DEVICE uint2 load_shared8(saddr p) {
    uint2 r;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(r.x), "=r"(r.y) : "r"(p));
    return r;
}
DEVICE uint4 load_shared16(saddr p) {
    uint4 r;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "r"(p));
    return r;
}

// Stores 16 bytes, 16-byte aligned.
DEVICE void store_shared16(saddr p, const float (&v)[4]) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};"
                 ::"r"(p), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
}

// ---- clusters: blocks that reach into one another's shared memory -----------------------------
// `Launch.cluster` neighbouring blocks along x run at the same time. An address of the shared
// memory of any of them, including the block itself, is also a u32, but in another address space
// than saddr: it comes from cluster_address and goes to the functions whose parameter is `remote`.
//
// A block's memory must not be accessed by others before it is known to have started, nor after it
// may have ended: all blocks synchronise (cluster_arrive and cluster_wait) before the first access
// and after the last. The latter is not needed if no block loads from others and each block waits,
// on barriers of its own, for everything that others store, copy or arrive there.
DEVICE u32 cluster_rank() {
    u32 r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
// 1 for a launch without clusters.
DEVICE u32 cluster_size() {
    u32 r;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(r));
    return r;
}
// All threads of all blocks of the cluster that have not exited arrive, then wait; those of a warp
// together. A thread may do other work in between, but must not exit. After the wait, everything
// that any of them wrote before it arrived is visible to all, and all its earlier reads are
// complete.
DEVICE void cluster_arrive() {
    sync_warp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
DEVICE void cluster_wait() {
    sync_warp();
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The same without ordering earlier reads and writes: to know that the others have started, and to
// publish barriers after barrier_init_done.
DEVICE void cluster_arrive_relaxed() {
    sync_warp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
// The address in block `rank` of the cluster that corresponds to `local` in this block.
DEVICE u32 cluster_address(saddr local, u32 rank) {
    u32 r;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(local), "r"(rank));
    return r;
}
// Loads 16 bytes, 16-byte aligned, from any block, with the visibility of an ordinary load.
DEVICE float4 load_cluster16(u32 remote) {
    float4 r;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(r.x), "=f"(r.y), "=f"(r.z), "=f"(r.w) : "r"(remote) : "memory");
    return r;
}
// Stores 16 bytes, 16-byte aligned, to any block, asynchronously. They count as 16 announced bytes
// on `remote_barrier`, a barrier of the same block, where barrier_wait_cluster makes them visible.
// They may arrive before that phase's barrier_expect as long as an arrival of the phase is missing;
// the previous phase must have ended. Nothing else that this thread wrote becomes visible by it.
DEVICE void store_cluster16(u32 remote, const float4& value, u32 remote_barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32"
                 " [%0], {%1, %2, %3, %4}, [%5];"
                 ::"r"(remote), "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w),
                 "r"(remote_barrier) : "memory");
}
// barrier_arrive at any block's barrier, `times` times: this thread's earlier reads and writes are
// complete for a thread that waits there with barrier_wait_cluster.
DEVICE void barrier_arrive_cluster(u32 remote_barrier, u32 times = 1) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0], %1;"
                 ::"r"(remote_barrier), "r"(times) : "memory");
}
// barrier_wait at the block's own barrier, if other blocks arrive, store or copy there.
DEVICE void barrier_wait_cluster(saddr barrier, u32 parity) {
    asm volatile("{.reg .pred p; again:"
                 " mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;"
                 " @!p bra again;}" ::"r"(barrier), "r"(parity) : "memory");
}

// ---- matrices --------------------------------------------------------------------------------
// Four 8x8 matrices of 16-bit elements; lanes 8i..8i+7 give the row addresses of matrix i. Lane l
// receives of each matrix row l/4, columns 2(l%4) and 2(l%4)+1.
DEVICE void load_matrix4(u32 (&r)[4], saddr row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row) : "memory");
}
// The same, each matrix transposed: lane l receives rows 2(l%4), 2(l%4)+1 of column l/4.
DEVICE void load_matrix4_transposed(u32 (&r)[4], saddr row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row) : "memory");
}
// The inverse of load_matrix4: stores four matrices to shared memory.
DEVICE void store_matrix4(saddr row, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(row), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
// d[16,8] += a[16,16] b[16,8], float32 accumulation. Fragments of lane l, g = l / 4, t = l % 4:
//   a[0] (g, 2t..2t+1)  a[1] (g+8, 2t..)  a[2] (g, 2t+8..)  a[3] (g+8, 2t+8..)
//   b0 (rows 2t..2t+1, column g)   b1 (rows 2t+8.., column g)
//   d[0], d[1] (g, 2t..2t+1)   d[2], d[3] (g+8, 2t..)
DEVICE void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
