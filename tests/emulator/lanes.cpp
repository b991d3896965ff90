// Collectives: barriers of a block, of some of its warps and of a cluster; exchanges between the
// lanes of a warp, and its matrix products.
#include <string.h>

#include "state.h"

namespace emulator {
namespace {

int lane_of(const Thread* t) { return static_cast<int>(t->index.x) % LANES; }
Warp& warp_of(const Thread* t) { return t->block->warps[t->index.x / LANES]; }
Thread* first_lane(const Thread* t) { return t->block->threads + t->index.x / LANES * LANES; }

// Called by every lane of a warp. The last one to arrive runs `compute` on the operands of all.
// `whole`: the warp must have 32 lanes.
void meet_warp(const char* doing, void (*compute)(Thread* lanes, int count), bool whole) {
    Warp& warp = warp_of(self);
    Thread* lanes = first_lane(self);
    self->doing = doing;
    if (warp.arrived == 0) warp.doing = doing;
    if (warp.doing != doing && strcmp(warp.doing, doing) != 0) {
        fault("lanes of one warp in different collectives: this one in %s, others in %s", doing,
              warp.doing);
    }
    for (int i = 0; warp.away > 0 && i < warp.lanes; i++) {
        State state = lanes[i].state;
        if (state == State::BLOCK || state == State::EXITED) {
            fault("lanes of one warp in different collectives: this one in %s, lane %d %s %s",
                  doing, i, state == State::BLOCK ? "in" : "has",
                  state == State::BLOCK ? lanes[i].doing : "ended");
        }
    }
    if (whole && warp.lanes != LANES) fault("%s needs 32 lanes (got %d)", doing, warp.lanes);
    if (++warp.arrived < warp.lanes) return give_way(State::WARP);
    warp.arrived = 0;
    compute(lanes, warp.lanes);
    for (int i = 0; i < warp.lanes; i++) lanes[i].state = State::READY;
}

// Waits at barrier `id` of the block for `wanted` threads (id 0: for all that have not ended).
void meet_block(int id, int wanted, const char* doing) {
    Warp& warp = warp_of(self);
    if (warp.arrived != 0) {
        fault("lanes of one warp in different collectives: this one in %s, others in %s", doing,
              warp.doing);
    }
    self->doing = doing;
    self->barrier = id;
    Meeting& meeting = self->block->meetings[id];
    if (meeting.arrived == 0) meeting.wanted = wanted, meeting.doing = doing;
    if (id != 0 && meeting.wanted != wanted) {
        fault("barrier %d: threads must be the same for all (got %d and %d)", id, wanted,
              meeting.wanted);
    }
    if (strcmp(meeting.doing, doing) != 0) {
        fault("barrier %d: this thread in %s, others in %s", id, doing, meeting.doing);
    }
    meeting.arrived++;
    warp.away++;
    give_way(State::BLOCK);
}

void meet_some(int id, int count, const char* doing) {
    if (id < 1 || id >= BARRIERS) fault("%s: id must be 1 to 15 (got %d)", doing, id);
    if (count < LANES || count % LANES != 0 || count > thread_count) {
        fault("%s: threads must be whole warps of the block (got %d)", doing, count);
    }
    meet_block(id, count, doing);
}

void order_lanes(Thread* lanes, int count) {
    std::vector<int> these;
    for (int i = 0; i < count; i++) these.push_back(lanes[i].number);
    races.meet(these);
}

// ---- the cluster ---------------------------------------------------------------------------------
int arrived;   // threads that have arrived at the current barrier of the cluster
u32 meetings;  // number of completed ones

void arrive_cluster(bool relaxed, const char* doing) {
    if (self->arrived) fault("%s: again before cluster_wait", doing);
    self->arrived = true;
    self->meeting = meetings;
    races.arrive_cluster(self->number, relaxed);
    arrived++;
    open_cluster();
}

}  // namespace

void start_meetings() { arrived = 0, meetings = 0; }

void open_meetings(Block& block) {
    for (int id = 0; id < BARRIERS; id++) {
        Meeting& meeting = block.meetings[id];
        int wanted = id == 0 ? block.alive : meeting.wanted;
        if (meeting.arrived == 0 || meeting.arrived < wanted) continue;
        if (meeting.arrived > wanted) {
            self = nullptr;
            fault_at(nullptr, "barrier %d: %d threads came, %d were meant to", id,
                     meeting.arrived, wanted);
        }
        meeting.arrived = 0;
        std::vector<Thread*> came;
        std::vector<int> these;
        u32 any = 0;
        for (int i = 0; i < thread_count; i++) {
            Thread& t = block.threads[i];
            if (t.state != State::BLOCK || t.barrier != id) continue;
            t.state = State::READY;
            warp_of(&t).away--;
            came.push_back(&t);
            these.push_back(t.number);
            any |= t.in[0];
        }
        for (Thread* t : came) t->out[0] = any;
        races.meet(these);
    }
}

// Completes the cluster's barrier if all threads that have not ended have arrived.
void open_cluster() {
    int wanted = 0;
    for (int b = 0; b < block_count; b++) wanted += blocks[b].alive;
    if (arrived == 0 || arrived < wanted) return;
    arrived = 0;
    meetings++;
    races.open_cluster();
    for (int i = 0; i < block_count * thread_count; i++) {
        Thread& t = blocks[0].threads[i];
        if (t.state == State::CLUSTER) t.state = State::READY;
    }
}

void cluster_arrive() {
    SITE();
    arrive_cluster(false, "cluster_arrive");
}

void cluster_arrive_relaxed() {
    SITE();
    arrive_cluster(true, "cluster_arrive_relaxed");
}

void cluster_wait() {
    SITE();
    if (!self->arrived) fault("cluster_wait: without cluster_arrive");
    if (self->meeting == meetings) {
        self->doing = "cluster_wait";
        give_way(State::CLUSTER);
    }
    self->arrived = false;
    races.wait_cluster(self->number);
}

u32 cluster_rank() { return static_cast<u32>(self->block->rank); }
u32 cluster_size() { return static_cast<u32>(block_count); }

void sync_block() {
    SITE();
    meet_block(0, 0, "sync_block");
}

void sync_some(int id, int count) {
    SITE();
    meet_some(id, count, "sync_some");
}

bool sync_some_any(int id, int count, bool x) {
    SITE();
    self->in[0] = x;
    meet_some(id, count, "sync_some_any");
    return self->out[0] != 0;
}

void sync_warp() {
    SITE();
    meet_warp("sync_warp", order_lanes, false);
}

u32 shuffle(u32 x, int lane) {
    SITE();
    self->in[0] = x;
    self->in[1] = static_cast<u32>(lane) % LANES;
    meet_warp("shuffle", [](Thread* lanes, int count) {
        for (int i = 0; i < count; i++) lanes[i].out[0] = lanes[lanes[i].in[1]].in[0];
    }, false);
    return self->out[0];
}

u32 shuffle_xor(u32 x, int mask) {
    SITE();
    if (mask < 0 || mask >= LANES) fault("shuffle_xor: mask must be 0 to 31 (got %d)", mask);
    self->in[0] = x;
    self->in[1] = static_cast<u32>(lane_of(self) ^ mask);
    meet_warp("shuffle_xor", [](Thread* lanes, int count) {
        for (int i = 0; i < count; i++) lanes[i].out[0] = lanes[lanes[i].in[1]].in[0];
    }, false);
    return self->out[0];
}

u32 ballot(bool x) {
    SITE();
    self->in[0] = x;
    meet_warp("ballot", [](Thread* lanes, int count) {
        u32 all = 0;
        for (int i = 0; i < count; i++) all |= lanes[i].in[0] << i;
        for (int i = 0; i < count; i++) lanes[i].out[0] = all;
    }, false);
    return self->out[0];
}

// ---- matrices ----------------------------------------------------------------------------------
namespace {

u32 element(const Thread* lanes, int matrix, int row, int column) {
    const u8* p = at(lanes[8 * matrix + row].in[0]) + 2 * column;
    return static_cast<u32>(p[0] | p[1] << 8);
}

template <bool TRANSPOSED> void compute_load(Thread* lanes, int) {
    for (int l = 0; l < LANES; l++) {
        for (int m = 0; m < 4; m++) {
            int far = l / 4, near = 2 * (l % 4);
            lanes[l].out[m] = TRANSPOSED
                ? element(lanes, m, near, far) | element(lanes, m, near + 1, far) << 16
                : element(lanes, m, far, near) | element(lanes, m, far, near + 1) << 16;
        }
    }
}

void compute_store(Thread* lanes, int) {
    for (int l = 0; l < LANES; l++) {
        for (int m = 0; m < 4; m++) {
            memcpy(at(lanes[8 * m + l / 4].in[4]) + 4 * (l % 4), lanes[l].in + m, 4);
        }
    }
}

float widen_bf16(u32 x) {
    u32 bits = x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
float widen_f16(u32 x) {
    u32 magnitude = x & 0x7fffu, sign = (x & 0x8000u) << 16, bits;
    float value;
    if (magnitude >= 0x7c00u) {
        bits = 0x7f800000u | (magnitude & 0x3ffu) << 13;
    } else {
        bits = magnitude << 13;
        memcpy(&value, &bits, 4);
        value *= 0x1p112f;
        memcpy(&bits, &value, 4);
    }
    bits |= sign;
    memcpy(&value, &bits, 4);
    return value;
}

template <float (*WIDEN)(u32)> void compute_mma(Thread* lanes, int) {
    float a[16][16], b[16][8];
    for (int l = 0; l < LANES; l++) {
        int g = l / 4, t = 2 * (l % 4);
        const u32* in = lanes[l].in;
        for (int i = 0; i < 4; i++) {
            float* row = a[g + 8 * (i & 1)] + t + 8 * (i >> 1);
            row[0] = WIDEN(in[i] & 0xffffu), row[1] = WIDEN(in[i] >> 16);
        }
        for (int i = 0; i < 2; i++) {
            b[t + 8 * i][g] = WIDEN(in[4 + i] & 0xffffu);
            b[t + 8 * i + 1][g] = WIDEN(in[4 + i] >> 16);
        }
    }
    float d[16][8];
    for (int l = 0; l < LANES; l++) {
        for (int i = 0; i < 4; i++) d[l / 4 + 8 * (i >> 1)][2 * (l % 4) + (i & 1)] = lanes[l].d[i];
    }
    for (int m = 0; m < 16; m++) {
        for (int k = 0; k < 16; k++) {
            for (int n = 0; n < 8; n++) d[m][n] += a[m][k] * b[k][n];
        }
    }
    for (int l = 0; l < LANES; l++) {
        for (int i = 0; i < 4; i++) lanes[l].d[i] = d[l / 4 + 8 * (i >> 1)][2 * (l % 4) + (i & 1)];
    }
}

}  // namespace

void load_matrix4(u32* r, u32 row, bool transposed) {
    SITE();
    check_shared(row, 16, 16, "load_matrix4");
    check_race(own(row), 16, false, "load_matrix4");
    self->in[0] = row;
    if (transposed) meet_warp("load_matrix4_transposed", compute_load<true>, true);
    else meet_warp("load_matrix4", compute_load<false>, true);
    memcpy(r, self->out, sizeof self->out);
}

void store_matrix4(u32 row, const u32* r) {
    SITE();
    check_shared(row, 16, 16, "store_matrix4");
    check_race(own(row), 16, true, "store_matrix4");
    memcpy(self->in, r, 16);
    self->in[4] = row;
    meet_warp("store_matrix4", compute_store, true);
}

void mma(float* d, const u32* a, u32 b0, u32 b1, bool half) {
    SITE();
    memcpy(self->in, a, 16);
    self->in[4] = b0, self->in[5] = b1;
    self->d = d;
    if (half) meet_warp("mma_f16", compute_mma<widen_f16>, true);
    else meet_warp("mma_bf16", compute_mma<widen_bf16>, true);
}

}  // namespace emulator
