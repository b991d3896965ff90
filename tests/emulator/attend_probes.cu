// Whether what a warp of verify_attention waits for, before parts of the cache are overwritten,
// depends on all that it loads from them. What one instruction loads is changed, one after another.
#include "verify_attention/mainloop.cuh"

// 16-bit elements between 0.5 and 1 (queries, weights), cache elements between 0.5 and 2.
DEVICE void fill(u8* memory) {
    u16* const elements = reinterpret_cast<u16*>(memory);
    for (int i = threadIdx.x; i < CACHE / 2; i += 32)
        elements[i] = (FP8 ? 0x3800 : 0x3f00) + i * 5 % 128;
    for (int i = CACHE / 2 + threadIdx.x; i < TOPS / 2; i += 32)
        elements[i] = FP8 ? 0x3030 + i * 3 % 16 : 0x3f00 + i * 3 % 128;
    sync_warp();
}

struct Turn {
    Running r;
    Scores s;

    DEVICE void run(u8* memory, int keys, int values, const Lane& at) {
        reset(r);
        mix<false>(r, memory, shared_address(memory + values), at);
        score(s, memory, shared_address(memory + keys), at);
    }
};

struct Count {
    u8* memory;
    int keys, values, loaded, silent;

    // Changes the 16 bytes that each lane loads from its own place.
    DEVICE void change(int at) {
        for (int i = 0; i < 4; i++)
            reinterpret_cast<u32*>(memory + at)[i] ^= FP8 ? 0x08080808 : 0x00400040;
        sync_warp();
    }
    DEVICE void with(int place, const Lane& at) {
        Turn before, after;
        before.run(memory, keys, values, at);
        sync_warp();
        change(place);
        after.run(memory, keys, values, at);
        sync_warp();
        change(place);
        loaded += ballot(__builtin_memcmp(&before, &after, sizeof before) != 0) != 0;
        silent += !ballot(last_of(before.s, before.r) != last_of(after.s, after.r));
    }
};

KERNEL void turn_loads(i32* found) {
    DYNAMIC_SHARED(memory);
    fill(memory);
    const Lane at = this_lane();
    Count count = {memory, CACHE, CACHE + 8 * PART, 0, 0};
    const int position = FP8 ? at.lane : ((at.lane >> 4) << 3) + (at.lane & 7);
    for (int step = 0; step < WIDTH / 16; step++) {
        const int chunk = FP8 ? step : 2 * step + (at.lane >> 3 & 1);
        count.with(count.keys + swizzled(position, chunk, CACHE_BYTES), at);
    }
    for (int step = 0; step < POSITIONS / 16; step++)
        for (int l = 0; l < LOADS; l++)
            count.with(count.values + value_at(at.lane & 15, 2 * l + (at.lane >> 4)) +
                           step * 16 * VALUE_PITCH, at);
    if (threadIdx.x == 0) found[0] = count.loaded, found[1] = count.silent;
}
