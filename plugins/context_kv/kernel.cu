// context_kv: a block processes one row of one layer, a warp one key/value head at a time.
#include "draft_attention/rotary.cuh"

#ifndef HEAD_DIM
#error "HEAD_DIM must be defined"
#endif
#ifndef NORM_F32
#error "NORM_F32 must be defined"
#endif

constexpr int D = HEAD_DIM;
constexpr int WARPS = 8;

template <class T> DEVICE T* pointer(const u64* table, int i) {
    return reinterpret_cast<T*>(table[i]);
}

DEVICE void put_head(u16* to, const Head<D>& h) {
#pragma unroll
    for (int i = 0; i < Head<D>::UNITS; i++) {
        int u = unit_of<D>(i);
        if (u >= D / 4) break;
        *reinterpret_cast<u32*>(to + low_of<D>(u)) = pack_bf16x2(h.x[i][0], h.x[i][1]);
        *reinterpret_cast<u32*>(to + high_of<D>(u)) = pack_bf16x2(h.x[i][2], h.x[i][3]);
    }
}

KERNEL void __launch_bounds__(WARPS * 32)
context_kv(const i32* length, const u64* keys, const u64* values, const u64* norms,
           const u64* rings_k, const u64* rings_v, const i32* slots, const float* frequency,
           int rows, int kv_heads, float eps) {
    int t = blockIdx.x, layer = blockIdx.y, warp = threadIdx.x / 32;
    int ring = slots[layer];
    Head<D> weight = load_weight<D>(pointer<const void>(norms, layer), NORM_F32);
    Frequencies<D> frequencies = load_frequencies<D>(frequency);
    let_next_start();
    wait_for_previous();
    // A later row of this call goes to the same slot, which must keep the newest position.
    if (t + ring < rows) return;
    int position = *length + t;
    u64 slot = position % ring;
    const Rotation<D> rotation[] = {rotation_at<D>(frequencies, position)};
    const u16* k = pointer<const u16>(keys, layer) + static_cast<u64>(t) * kv_heads * D;
    const u16* v = pointer<const u16>(values, layer) + static_cast<u64>(t) * kv_heads * D;
    for (int head = warp; head < kv_heads; head += WARPS) {
        u64 to = (static_cast<u64>(head) * ring + slot) * D;
        Head<D> key[] = {load_head<D>(k + head * D)};
        Head<D> value = load_head<D>(v + head * D);
        norm_and_rotate<D>(key, weight, rotation, eps);
        put_head(pointer<u16>(rings_k, layer) + to, key[0]);
        put_head(pointer<u16>(rings_v, layer) + to, value);
    }
}
