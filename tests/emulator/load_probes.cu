// Whether a value that stands for a lane's loads depends on all of them. Parts of shared memory are
// changed one at a time, and what a lane then loads is compared with what it loaded before.
//
// Compile-time: PREFILL, whether of the product with many rows; otherwise those of epilogue.cuh.
#include "cuda/device.cuh"
#if PREFILL
#include "linear/fragments.cuh"
#else
#include "linear/epilogue.cuh"
#endif

constexpr int PART = 32, ROW_TILE = 16 * SLAB_ROW;  // bytes that are changed together

DEVICE void change(u32* words, int bytes) {
    sync_warp();
    for (int i = threadIdx.x; i < bytes / 4; i += 32) words[i] ^= 0x1000u << i % 8;
    sync_warp();
}

// found: for each lane, how many parts it loads, and how many of these do not change `last`.
template <class Loads> DEVICE void compare(const u32* in, int2* found) {
    DYNAMIC_SHARED(memory);
    u32* const words = reinterpret_cast<u32*>(memory);
    for (int i = threadIdx.x; i < Loads::BYTES / 4; i += 32) words[i] = in[i];
    sync_warp();
    Loads before = {}, after = {};
    before.load(shared_address(memory), in);
    int2 count = {0, 0};
    for (int at = 0, part; at < Loads::BYTES; at += part) {
        part = at < Loads::ROWS ? PART : ROW_TILE;
        change(words + at / 4, part);
        after.load(shared_address(memory), in);
        const bool loads = __builtin_memcmp(&before, &after, sizeof before) != 0;
        count.x += loads;
        count.y += loads && before.last() == after.last();
        change(words + at / 4, part);
    }
    found[threadIdx.x] = count;
}

#if PREFILL
template <int KIND> struct Weights {
    static constexpr int BYTES = step_bytes(KIND == NARROW ? NVFP4 : KIND) / 2, ROWS = BYTES;
    Packed<KIND> packed;
    DEVICE void load(saddr at, const u32*) {
        packed.load(at + packed.words_at(1), at + packed.scales_at(1), 3);
    }
    DEVICE u32 last() const { return packed.last(); }
};
KERNEL void packed_nvfp4(const u32* in, int2* found) { compare<Weights<NVFP4>>(in, found); }
KERNEL void packed_fp8(const u32* in, int2* found) { compare<Weights<FP8>>(in, found); }
KERNEL void packed_bfloat16(const u32* in, int2* found) { compare<Weights<BF16>>(in, found); }
KERNEL void packed_narrow(const u32* in, int2* found) { compare<Weights<NARROW>>(in, found); }
#else
DEVICE saddr row_of_lane(saddr rows) {
    const u32 lane = threadIdx.x % 32;
    return rows + lane % 16 * SLAB_ROW + (lane % 8 ^ lane / 16) * 16;
}

struct OfNvfp4 {
    static constexpr int ROWS = NVFP4_SLOT, BYTES = ROWS + ROW_TILES * ROW_TILE;
    Nvfp4 x;
    DEVICE void load(saddr at, const u32*) { x.load(at, row_of_lane(at + ROWS), 3, 1); }
    DEVICE u32 last() const { return x.last(); }
};
KERNEL void quarter(const u32* in, int2* found) { compare<OfNvfp4>(in, found); }

struct OfNarrow {
    static constexpr int ROWS = NARROW_SLOT + 64, BYTES = ROWS + ROW_TILE;
    Narrow x;
    DEVICE void load(saddr at, const u32*) { x.load(at, row_of_lane(at + ROWS), 3); }
    DEVICE u32 last() const { return x.last(); }
};
KERNEL void narrow(const u32* in, int2* found) { compare<OfNarrow>(in, found); }

struct OfEnd {
    static constexpr int BYTES = STAGED_BYTES, ROWS = BYTES;
    EpilogueOperands x;
    DEVICE void load(saddr at, const u32* in) {
        Results from = {};
        from.outputs = reinterpret_cast<const u64*>(in);
        load_end(x, from, at, 0);
    }
    DEVICE u32 last() const { return x.last(); }
};
KERNEL void ends(const u32* in, int2* found) { compare<OfEnd>(in, found); }

struct OfSums {
    static constexpr int BYTES = PARTS * HALF_BYTES, ROWS = BYTES;
    OwnSums x;
    DEVICE void load(saddr at, const u32*) {
        const PartialSumBuffer partials = {at, 0, 0};
        partials.add(x);
    }
    DEVICE u32 last() const { return last_of(x); }
};
KERNEL void sums(const u32* in, int2* found) { compare<OfSums>(in, found); }
#endif
