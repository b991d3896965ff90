// Implements plugins/cuda/device.cuh on a CPU: the same names with the same meaning, so that kernel
// sources compile unchanged. `-I tests/emulator -I plugins` makes the compiler find this file first.
#pragma once

#if !defined(EMULATOR_LIST)  // see below
#include <math.h>
#include <string.h>

#include "machine.h"
#endif

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __restrict__ __restrict
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static __attribute__((section("emulated_shared")))
#define __constant__ static
#define __grid_constant__

#if defined(EMULATOR_LIST)  // only preprocessed, to find the kernels and their parameters
#define KERNEL emulated_kernel
#else
#define KERNEL __global__
#endif
#define DEVICE __device__ __forceinline__
#define CLUSTERS_OF(n)
#define DYNAMIC_SHARED(name) u8* const name = emulator::dynamic_memory + emulator::LEAD

constexpr int warpSize = 32;
constexpr u32 ALL_LANES = 0xffffffffu;

// ---- vectors ---------------------------------------------------------------------------------
#define EMULATED_VECTOR(type, name, alignment)                                            \
    struct alignas(2 * alignment) name##2 { type x, y; };                                 \
    struct name##3 { type x, y, z; };                                                     \
    struct alignas(4 * alignment) name##4 { type x, y, z, w; };                           \
    inline name##2 make_##name##2(type x, type y) { return {x, y}; }                      \
    inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }           \
    inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
EMULATED_VECTOR(float, float, 4)
EMULATED_VECTOR(int, int, 4)
EMULATED_VECTOR(unsigned, uint, 4)
EMULATED_VECTOR(short, short, 2)
EMULATED_VECTOR(unsigned short, ushort, 2)
EMULATED_VECTOR(signed char, char, 1)
EMULATED_VECTOR(unsigned char, uchar, 1)
#undef EMULATED_VECTOR
struct alignas(16) ulonglong2 { u64 x, y; };
struct alignas(16) longlong2 { i64 x, y; };
struct alignas(16) double2 { double x, y; };
inline ulonglong2 make_ulonglong2(u64 x, u64 y) { return {x, y}; }
inline longlong2 make_longlong2(i64 x, i64 y) { return {x, y}; }
inline double2 make_double2(double x, double y) { return {x, y}; }

// ---- built-in functions ----------------------------------------------------------------------
template <class T> inline T emulated_bits(const void* p) {
    T value;
    memcpy(&value, p, sizeof value);
    return value;
}
inline float __uint_as_float(u32 x) { return emulated_bits<float>(&x); }
inline u32 __float_as_uint(float x) { return emulated_bits<u32>(&x); }
inline float __int_as_float(i32 x) { return emulated_bits<float>(&x); }
inline i32 __float_as_int(float x) { return emulated_bits<i32>(&x); }
inline float rsqrtf(float x) { return static_cast<float>(1.0 / sqrt(static_cast<double>(x))); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __saturatef(float x) { return fminf(fmaxf(x, 0.0f), 1.0f); }
inline int __popc(u32 x) { return __builtin_popcount(x); }
inline int __popcll(u64 x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<u32>(x)); }
template <class T> inline T __ldg(const T* p) { return *p; }
#define EMULATED_MINMAX(type)                                       \
    inline type min(type a, type b) { return b < a ? b : a; }       \
    inline type max(type a, type b) { return a < b ? b : a; }
EMULATED_MINMAX(int)
EMULATED_MINMAX(unsigned)
EMULATED_MINMAX(i64)
EMULATED_MINMAX(u64)
EMULATED_MINMAX(long)
EMULATED_MINMAX(unsigned long)
#undef EMULATED_MINMAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline u32 min(u32 a, int b) { return min(a, static_cast<u32>(b)); }
inline u32 max(u32 a, int b) { return max(a, static_cast<u32>(b)); }
inline u32 min(int a, u32 b) { return min(static_cast<u32>(a), b); }
inline u32 max(int a, u32 b) { return max(static_cast<u32>(a), b); }

// ---- element types -------------------------------------------------------------------------
DEVICE float bits_float(u32 x) { return __uint_as_float(x); }
DEVICE u32 float_bits(float x) { return __float_as_uint(x); }

DEVICE float bf16_float(u16 x) { return bits_float(static_cast<u32>(x) << 16); }
DEVICE float bf16x2_low(u32 x) { return bits_float(x << 16); }
DEVICE float bf16x2_high(u32 x) { return bits_float(x & 0xffff0000u); }

DEVICE u16 float_bf16(float x) {
    u32 bits = float_bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return static_cast<u16>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
DEVICE u32 pack_bf16x2(float low, float high) {
    return float_bf16(low) | static_cast<u32>(float_bf16(high)) << 16;
}
DEVICE u32 mul_bf16x2(u32 a, u32 b) {
    return pack_bf16x2(bf16x2_low(a) * bf16x2_low(b), bf16x2_high(a) * bf16x2_high(b));
}

DEVICE u32 twice_low(u32 x) { return (x & 0xffffu) | x << 16; }
DEVICE u32 twice_high(u32 x) { return (x & 0xffff0000u) | x >> 16; }

DEVICE float emulated_f16_float(u16 x) {
    u32 magnitude = x & 0x7fffu, sign = static_cast<u32>(x & 0x8000u) << 16;
    if (magnitude >= 0x7c00u) return bits_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    float scaled = bits_float(magnitude << 13) * 0x1p112f;  // also right for subnormals
    return bits_float(sign | float_bits(scaled));
}
// Rounds to nearest even; values beyond the range become infinity.
DEVICE u16 emulated_f16(float x) {
    u32 bits = float_bits(x), sign = bits >> 16 & 0x8000u;
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return 0x7fff;
    if (bits >= 0x477ff000u) return static_cast<u16>(sign | 0x7c00u);
    if (bits < 0x38800000u) {  // subnormal: units of 2^-24
        float units = nearbyintf(bits_float(bits) * 0x1p24f);
        return static_cast<u16>(sign | static_cast<u32>(units));
    }
    u32 rounded = bits + 0xfffu + (bits >> 13 & 1u);
    return static_cast<u16>(sign | (rounded - 0x38000000u) >> 13);
}
DEVICE u32 pack_f16x2(float low, float high) {
    return emulated_f16(low) | static_cast<u32>(emulated_f16(high)) << 16;
}
DEVICE float f16x2_low(u32 x) { return emulated_f16_float(static_cast<u16>(x)); }
DEVICE float f16x2_high(u32 x) { return emulated_f16_float(static_cast<u16>(x >> 16)); }

DEVICE u8 emulated_e4m3(float x) {
    u32 bits = float_bits(x), sign = bits >> 24 & 0x80u;
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return 0x7f;
    float size = bits_float(bits);
    if (size >= 448.0f) return static_cast<u8>(sign | 0x7eu);
    if (size < 0x1p-6f) {  // subnormal: units of 2^-9
        return static_cast<u8>(sign | static_cast<u32>(nearbyintf(size * 512.0f)));
    }
    u32 rounded = bits + 0x7ffffu + (bits >> 20 & 1u);
    u32 code = (rounded >> 20) - (120u << 3);
    return static_cast<u8>(sign | (code > 0x7eu ? 0x7eu : code));
}
DEVICE float emulated_e4m3_float(u8 x) {
    u32 sign = static_cast<u32>(x & 0x80u) << 24, magnitude = x & 0x7fu;
    if (magnitude == 0x7fu) return bits_float(0x7fffffffu);
    float scaled = bits_float(magnitude << 20) * 0x1p120f;
    return bits_float(sign | float_bits(scaled));
}
DEVICE u16 pack_e4m3x2(float low, float high) {
    return static_cast<u16>(emulated_e4m3(low) | emulated_e4m3(high) << 8);
}
inline u32 emulated_e4m3x2_f16x2(u16 x) {
    return pack_f16x2(emulated_e4m3_float(static_cast<u8>(x)), emulated_e4m3_float(static_cast<u8>(x >> 8)));
}
DEVICE void e4m3x4_f16x4(u32 x, u32& low, u32& high) {
    low = emulated_e4m3x2_f16x2(static_cast<u16>(x));
    high = emulated_e4m3x2_f16x2(static_cast<u16>(x >> 16));
}

DEVICE u32 opaque(u32 x) { return x; }
// A constant depends on no load, so nothing is known to have arrived.
DEVICE void received(u32 x) {
    if (!__builtin_constant_p(x)) emulator::received(x);
}
DEVICE u32 rotate_right(u32 x, int n) { return x >> (n & 31) | x << (-n & 31); }
DEVICE u32 select_bytes(u32 a, u32 b, u32 selector) {
    u64 all = static_cast<u64>(b) << 32 | a;
    u32 r = 0;
    for (int i = 0; i < 4; i++) {
        u32 nibble = selector >> 4 * i & 15u;
        u32 byte = static_cast<u32>(all >> 8 * (nibble & 7u)) & 0xffu;
        if (nibble & 8u) byte = byte & 0x80u ? 0xffu : 0u;
        r |= byte << 8 * i;
    }
    return r;
}

DEVICE float fma_rn(float a, float b, float c) { return fmaf(a, b, c); }
DEVICE float mul_rn(float a, float b) { return a * b; }
DEVICE float add_rn(float a, float b) { return a + b; }
DEVICE float reciprocal_approx(float x) { return fabsf(x) > 0x1p126f ? 0.0f : 1.0f / x; }
DEVICE float exp2_approx(float x) { return x < -126.0f ? 0.0f : exp2f(x); }

// ---- lanes, warps, blocks --------------------------------------------------------------------
DEVICE void sync_block() { emulator::sync_block(); }
DEVICE void sync_warp() { emulator::sync_warp(); }
DEVICE void sync_some(int id, int threads) { emulator::sync_some(id, threads); }
DEVICE bool sync_some_any(int id, int threads, bool x) {
    return emulator::sync_some_any(id, threads, x);
}
DEVICE u32 shuffle_xor(u32 x, int mask) { return emulator::shuffle_xor(x, mask); }
DEVICE i32 shuffle_xor(i32 x, int mask) {
    return static_cast<i32>(emulator::shuffle_xor(static_cast<u32>(x), mask));
}
DEVICE float shuffle_xor(float x, int mask) {
    return bits_float(emulator::shuffle_xor(float_bits(x), mask));
}
DEVICE u32 shuffle(u32 x, int lane) { return emulator::shuffle(x, lane); }
DEVICE u32 kept(u32 x) { return shuffle(x, static_cast<int>(threadIdx.x % 32)); }
DEVICE i32 shuffle(i32 x, int lane) {
    return static_cast<i32>(emulator::shuffle(static_cast<u32>(x), lane));
}
DEVICE float shuffle(float x, int lane) {
    return bits_float(emulator::shuffle(float_bits(x), lane));
}
DEVICE u32 ballot(bool x) { return emulator::ballot(x); }

// ---- one kernel and the next, between blocks ---------------------------------------------------
DEVICE void wait_for_previous() { emulator::wait_for_previous(); }
DEVICE void let_next_start() { emulator::let_next_start(); }
DEVICE u32 arrive(u32* counter) { return emulator::arrive(counter); }
DEVICE void fence_device() {}
DEVICE float4 load_shared_result(const float4* p) { return *p; }
DEVICE uint4 load_shared_result(const uint4* p) { return *p; }
DEVICE float load_shared_result(const float* p) { return *p; }
DEVICE u32 load_shared_result(const u32* p) { return *p; }
DEVICE int4 load_now(const int4* p) { return *p; }

// ---- shared memory by address ----------------------------------------------------------------
typedef u32 saddr;
DEVICE saddr shared_address(const void* p) { return emulator::shared_address(p); }
DEVICE void copy_async16(saddr to, const void* from) { emulator::copy_async16(to, from, true); }
DEVICE void copy_async16(saddr to, const void* from, bool valid) {
    emulator::copy_async16(to, from, valid);
}
DEVICE void copy_async_commit() { emulator::copy_async_commit(); }
template <int N> DEVICE void copy_async_wait() { emulator::copy_async_wait(N); }
DEVICE void barrier_init(saddr barrier, int count) { emulator::barrier_init(barrier, count); }
DEVICE void barrier_init_done() { emulator::barrier_init_done(); }
DEVICE void barrier_expect(saddr barrier, u32 bytes) { emulator::barrier_expect(barrier, bytes); }
DEVICE void barrier_announce(saddr barrier, u32 bytes) {
    emulator::barrier_announce(barrier, bytes);
}
DEVICE void barrier_arrive(saddr barrier) { emulator::barrier_arrive(barrier); }
DEVICE void barrier_arrive_received(saddr barrier, u32 x) {
    received(x);
    emulator::barrier_arrive(barrier);
}
DEVICE void barrier_wait(saddr barrier, u32 parity) { emulator::barrier_wait(barrier, parity); }
DEVICE void copy_bulk(saddr to, const void* from, u32 bytes, saddr barrier) {
    emulator::copy_bulk(to, from, bytes, barrier);
}
DEVICE void copy_bulk_kept(saddr to, const void* from, u32 bytes, saddr barrier) {
    emulator::copy_bulk(to, from, bytes, barrier);
}
DEVICE void prefetch_bulk(const void* from, u32 bytes) { emulator::prefetch(from, bytes); }
DEVICE u32 load_shared4(saddr p) {
    u32 r;
    emulator::load_shared(&r, p, 4);
    return r;
}
DEVICE uint2 load_shared8(saddr p) {
    uint2 r;
    emulator::load_shared(&r, p, 8);
    return r;
}
DEVICE uint4 load_shared16(saddr p) {
    uint4 r;
    emulator::load_shared(&r, p, 16);
    return r;
}
DEVICE void store_shared16(saddr p, const float (&v)[4]) { emulator::store_shared16(p, v); }

// ---- clusters --------------------------------------------------------------------------------
DEVICE u32 cluster_rank() { return emulator::cluster_rank(); }
DEVICE u32 cluster_size() { return emulator::cluster_size(); }
DEVICE void cluster_arrive() {
    emulator::sync_warp();
    emulator::cluster_arrive();
}
DEVICE void cluster_arrive_relaxed() {
    emulator::sync_warp();
    emulator::cluster_arrive_relaxed();
}
DEVICE void cluster_wait() {
    emulator::sync_warp();
    emulator::cluster_wait();
}
DEVICE u32 cluster_address(saddr local, u32 rank) { return emulator::cluster_address(local, rank); }
DEVICE float4 load_cluster16(u32 remote) {
    float4 r;
    emulator::load_cluster16(&r, remote);
    return r;
}
DEVICE void store_cluster16(u32 remote, const float4& value, u32 remote_barrier) {
    float4 read = value;  // checked like any load of this thread, if `value` is in memory
    emulator::store_cluster16(remote, &read, remote_barrier);
}
DEVICE void barrier_arrive_cluster(u32 remote_barrier, u32 times = 1) {
    for (u32 i = 0; i < times; i++) emulator::barrier_arrive_cluster(remote_barrier);
}
DEVICE void barrier_wait_cluster(saddr barrier, u32 parity) {
    emulator::barrier_wait_cluster(barrier, parity);
}

// ---- matrices --------------------------------------------------------------------------------
DEVICE void load_matrix4(u32 (&r)[4], saddr row) { emulator::load_matrix4(r, row, false); }
DEVICE void load_matrix4_transposed(u32 (&r)[4], saddr row) {
    emulator::load_matrix4(r, row, true);
}
DEVICE void store_matrix4(saddr row, const u32 (&r)[4]) { emulator::store_matrix4(row, r); }
DEVICE void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    emulator::mma(d, a, b0, b1, false);
}
DEVICE void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    emulator::mma(d, a, b0, b1, true);
}
