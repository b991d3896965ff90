// Whether what a warp of gdn's prefill waits for, before a stage is overwritten, depends on all that
// it loads from the stage. What one instruction loads is changed, one after another.
#include "gdn/prefill.cu"

DEVICE void change(u8* memory, int at, int words) {
    for (int i = 0; i < words; i++) reinterpret_cast<u32*>(memory + at)[i] ^= 0x00400040;
    sync_warp();
}

struct Chunk {
    float s[D / 8][4], o[4][4];

    // K is loaded twice; the second time alone if `late`.
    DEVICE void run(const u8* stage, bool late) {
        for (int j = 0; j < D / 8; j++)
            for (int i = 0; i < 4; i++)
                s[j][i] = o[j % 4][i] = 1.0f + 0.01f * (threadIdx.x + 7 * j + 3 * i);
        if (late) return into_state(s, o, shared_address(stage));
        advance(s, o, stage, reinterpret_cast<const float*>(stage + STAGE));
    }
};

// How many changes change any lane's results, and how many of these change no lane's `last_of`.
// Lanes load together, so one of them is enough.
struct Count {
    u8* stage;
    bool late;
    int loaded, silent;

    DEVICE void with(int at, int words) {
        Chunk before, after;
        before.run(stage, late);
        sync_warp();
        change(stage, at, words);
        after.run(stage, late);
        sync_warp();
        change(stage, at, words);
        if (!ballot(__builtin_memcmp(&before, &after, sizeof before) != 0)) return;
        loaded++;
        silent += !ballot(last_of(before.s, before.o) != last_of(after.s, after.o));
    }
};

KERNEL void stage_loads(const u32* in, i32* found) {
    DYNAMIC_SHARED(memory);
    u32* const words = reinterpret_cast<u32*>(memory);
    for (int i = threadIdx.x; i < (STAGE + CHUNK * VALUE_PITCH * 4) / 4; i += 32) words[i] = in[i];
    sync_warp();
    Count count = {memory, false, 0, 0};
    // A load takes 16 rows, of 16 bytes each from two places.
    const int row = threadIdx.x % 16, side = threadIdx.x / 16;
    const auto keys = [&](int i) {
        return i / 16 * KEY_PART + key_at(i / 8 % 2 * 16 + row, i % 8 * 2 + side);
    };
    const auto matrices = [&](int i) {
        return KEY_BYTES + i / 4 * MATRIX_PART + matrix_at(i / 2 % 2 * 16 + row, i % 2 * 2 + side);
    };
    for (int i = 0; i < 4 * 16; i++) count.with(keys(i), 4);
    for (int i = 0; i < 4 * 4; i++) count.with(matrices(i), 4);
    // Eight rows' gates, four times.
    for (int at = GAMMA; at < MATRIX_BYTES; at += 32)
        count.with(KEY_BYTES + at + threadIdx.x % 8 * 4, threadIdx.x < 8);
    count.late = true;
    for (int i = 0; i < 2 * 16; i++) count.with(keys(i), 4);
    if (threadIdx.x == 0) found[0] = count.loaded, found[1] = count.silent;
}
