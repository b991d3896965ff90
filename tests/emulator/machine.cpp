// The emulated multiprocessor. See machine.h.
#include "machine.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <vector>

#include "fiber.h"
#include "races.h"

Index threadIdx, blockIdx, blockDim, gridDim;

extern "C" {
// The ends of this library and of its statically allocated shared memory, from the linker.
extern unsigned char __start_emulated_shared[] __attribute__((visibility("hidden")));
extern unsigned char __stop_emulated_shared[] __attribute__((visibility("hidden")));
extern unsigned char __ehdr_start[] __attribute__((visibility("hidden")));
extern unsigned char _end[] __attribute__((visibility("hidden")));
}

namespace emulator {

__attribute__((section("emulated_shared"), aligned(1024))) u8
    dynamic_memory[LEAD + LARGEST_SHARED + GUARD];

namespace {

constexpr u8 POISON = 0xff, CANARY = 0xfd;
constexpr int MOST_THREADS = 1024, LANES = 32, BARRIERS = 16;

enum class State { READY, WARP, BLOCK, PHASE, EXITED };

struct Copy {
    u32 to;
    const u8* from;
    u32 bytes;
    u32 barrier;
    bool valid;
    u32 group;
    u64 site;
};

struct Thread {
    Fiber fiber;
    Index index;
    State state;
    const char* doing;  // the collective it waits in
    const void* site;   // where in the kernel
    u32 in[6], lane;    // operands of the warp's collective
    float* d;
    u32 out[4];
    int barrier;        // State::BLOCK: which
    u32 phase;          // State::PHASE: which barrier
    u32 committed;
    bool waited;
    std::vector<Copy> copies;
};

struct Warp {
    const char* doing;
    int arrived, lanes;
};

struct Meeting {
    int arrived, wanted;
};

Thread threads[MOST_THREADS];
Warp warps[LANES];
Meeting meetings[BARRIERS];
std::vector<Copy> bulk;
Thread* self;
int thread_count, alive;
const Launch* launch;
void (*kernel_body)();
jmp_buf leave;
u64 chance;
Races races;
Global between;

u32 pick(u32 n) {
    chance ^= chance << 13, chance ^= chance >> 7, chance ^= chance << 17;
    return static_cast<u32>((chance >> 20) % n);
}

// ---- faults ------------------------------------------------------------------------------------
int say(int at, const char* format, va_list list) {
    int left = launch->message_bytes - at;
    if (left <= 1) return at;
    int n = vsnprintf(launch->message + at, static_cast<size_t>(left), format, list);
    return at + std::min(n, left - 1);
}
int say(int at, const char* format, ...) {
    va_list list;
    va_start(list, format);
    at = say(at, format, list);
    va_end(list);
    return at;
}

// A place in the kernel's code, for the reader of the message to look up.
u64 offset(const void* site) {
    return static_cast<u64>(static_cast<const u8*>(site) - __ehdr_start);
}

[[noreturn]] void fault_at(const void* site, const char* format, ...) {
    int at = say(0, "%s: ", launch->kernel);
    if (self != nullptr) {
        at = say(at, "block (%u, %u, %u) thread %d at @0x%llx: ", blockIdx.x, blockIdx.y,
                 blockIdx.z, static_cast<int>(self - threads), offset(site));
    }
    va_list list;
    va_start(list, format);
    say(at, format, list);
    va_end(list);
    longjmp(leave, 1);
}
#define fault(...) fault_at(self->site, __VA_ARGS__)
#define SITE() (self->site = static_cast<u8*>(__builtin_return_address(0)) - 1)

void crashed(int signal, siginfo_t* info, void* context) {
    const void* site = __ehdr_start;
#if defined(__x86_64__)
    site = reinterpret_cast<void*>(
        static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP]);
#elif defined(__aarch64__)
    site = reinterpret_cast<void*>(static_cast<ucontext_t*>(context)->uc_mcontext.pc);
#endif
    if (signal == SIGILL) fault_at(site, "a misaligned access, a bad shift or index");
    if (signal == SIGFPE) fault_at(site, "an integer division by zero");
    fault_at(site, "an access of memory that is not there, address %p", info->si_addr);
}

// ---- memory ------------------------------------------------------------------------------------
u8* at(u32 address) { return dynamic_memory + address; }

void check_shared(u32 address, u32 bytes, u32 alignment, const char* what) {
    u64 end = static_cast<u64>(address) + bytes;
    u64 dynamic = static_cast<u64>(LEAD + launch->shared);
    u64 all = static_cast<u64>(__stop_emulated_shared - dynamic_memory);
    bool in_dynamic = address >= LEAD && end <= dynamic;
    bool in_static = address >= sizeof dynamic_memory && end <= all;
    if (!in_dynamic && !in_static) {
        fault("%s: %u bytes at shared address %u are outside of shared memory "
              "(dynamic: %d .. %llu)", what, bytes, address, LEAD, dynamic);
    }
    if (address % alignment != 0) {
        fault("%s: shared address must be a multiple of %u (got %u)", what, alignment, address);
    }
}

int number(const Thread* t) { return static_cast<int>(t - threads); }

// An access of shared memory by the running thread, in order with those of all others.
void check_race(u32 address, u32 bytes, bool write, const char* what) {
    Races::Place other = races.access(number(self), address, bytes, write, offset(self->site));
    if (other.thread < 0) return;
    bool engine = other.thread == thread_count;
    fault("%s: a race at shared address %u: %s %d %s it at @0x%llx and no barrier lies between",
          what, address, engine ? "a bulk copy," : "thread", other.thread,
          other.wrote ? "wrote" : "read", other.site);
}

const Range* last_range;

const Range* find_range(const u8* p, u64 bytes) {
    auto holds = [&](const Range* r) {
        return p >= r->begin && p + bytes <= r->begin + r->bytes;
    };
    if (last_range != nullptr && holds(last_range)) return last_range;
    for (int i = 0; i < launch->ranges; i++) {
        if (holds(launch->memory + i)) return last_range = launch->memory + i;
    }
    return nullptr;
}

void check_global(const void* p, u64 bytes, bool write, const char* what) {
    const Range* range = find_range(static_cast<const u8*>(p), bytes);
    if (range == nullptr) {
        fault("%s: %llu bytes at %p are in no buffer of this call", what, bytes, p);
    }
    if (write && !(range->flags & WRITABLE)) {
        fault("%s: a write to an input, %p", what, p);
    }
    bool early = range->flags & READ_EARLY && !write;
    if (range->flags & FROM_KERNELS && !early && !self->waited) {
        fault("%s: memory that other kernels use, before wait_for_previous, %p", what, p);
    }
    if (!(range->flags & WRITABLE)) return;
    u64 where = reinterpret_cast<u64>(p);
    if (write) return between.write(races, number(self), where, bytes, offset(self->site));
    Races::Place other = between.read(races, number(self), where, bytes);
    if (other.thread < 0) return;
    fault("%s: a race in device memory: thread %d of this or another block wrote it at @0x%llx and "
          "nothing orders the two", what, other.thread, other.site);
}

bool own(const u8* p, const u8* begin, const u8* end) { return p >= begin && p < end; }

}  // namespace

// Every load and store of the kernel's own code.
void access(const void* address, u64 bytes, bool write, const void* site) {
    if (self == nullptr) return;
    const u8* p = static_cast<const u8*>(address);
    const u8* stack = self->fiber.stack;
    if (own(p, stack, stack + STACK)) return;
    self->site = static_cast<const u8*>(site) - 1;
    const char* what = write ? "store" : "load";
    if (own(p, dynamic_memory, __stop_emulated_shared)) {
        u32 where = static_cast<u32>(p - dynamic_memory);
        check_shared(where, static_cast<u32>(bytes), 1, what);
        check_race(where, static_cast<u32>(bytes), write, what);
    } else if (!own(p, __ehdr_start, _end)) {
        if (reinterpret_cast<u64>(p) % bytes != 0) {
            fault("%s: address must be a multiple of %llu (got %p)", what, bytes, address);
        }
        check_global(p, bytes, write, what);
    }
}

namespace {

// ---- giving way ----------------------------------------------------------------------------------
Fiber scheduler;

void give_way(State state) {
    self->state = state;
    switch_fiber(self->fiber, scheduler);
}

void thread_main() {
    kernel_body();
    self->state = State::EXITED;
    alive--;
    switch_fiber(self->fiber, scheduler);
}

int lane_of(const Thread* t) { return static_cast<int>(t - threads) % LANES; }
Warp& warp_of(const Thread* t) { return warps[(t - threads) / LANES]; }
Thread* first_lane(const Thread* t) { return threads + (t - threads) / LANES * LANES; }

// All lanes of the warp come here; the last one runs `compute` over the operands of all.
void meet_warp(const char* doing, void (*compute)(Thread* lanes, int count), bool whole) {
    Warp& warp = warp_of(self);
    Thread* lanes = first_lane(self);
    self->doing = doing;
    if (warp.arrived == 0) warp.doing = doing;
    if (strcmp(warp.doing, doing) != 0) {
        fault("lanes of one warp in different collectives: this one in %s, others in %s", doing,
              warp.doing);
    }
    for (int i = 0; i < warp.lanes; i++) {
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

void meet_block(int id, int wanted, const char* doing) {
    Warp& warp = warp_of(self);
    if (warp.arrived != 0) {
        fault("lanes of one warp in different collectives: this one in %s, others in %s", doing,
              warp.doing);
    }
    self->doing = doing;
    self->barrier = id;
    Meeting& meeting = meetings[id];
    if (meeting.arrived == 0) meeting.wanted = wanted;
    if (id != 0 && meeting.wanted != wanted) {
        fault("barrier %d: threads must be the same for all (got %d and %d)", id, wanted,
              meeting.wanted);
    }
    meeting.arrived++;
    give_way(State::BLOCK);
}

void open_meetings() {
    for (int id = 0; id < BARRIERS; id++) {
        Meeting& meeting = meetings[id];
        int wanted = id == 0 ? alive : meeting.wanted;
        if (meeting.arrived == 0 || meeting.arrived < wanted) continue;
        if (meeting.arrived > wanted) {
            self = nullptr;
            fault_at(nullptr, "barrier %d: %d threads came, %d were meant to", id,
                     meeting.arrived, wanted);
        }
        meeting.arrived = 0;
        std::vector<int> these;
        for (int i = 0; i < thread_count; i++) {
            Thread& t = threads[i];
            if (t.state != State::BLOCK || t.barrier != id) continue;
            t.state = State::READY;
            these.push_back(i);
        }
        races.meet(these);
    }
}

void order_lanes(Thread* lanes, int count) {
    std::vector<int> these;
    for (int i = 0; i < count; i++) these.push_back(number(lanes + i));
    races.meet(these);
}

}  // namespace

void sync_block() {
    SITE();
    meet_block(0, 0, "sync_block");
}

void sync_some(int id, int count) {
    SITE();
    if (id < 1 || id >= BARRIERS) fault("sync_some: id must be 1 to 15 (got %d)", id);
    if (count < LANES || count % LANES != 0 || count > thread_count) {
        fault("sync_some: threads must be whole warps of the block (got %d)", count);
    }
    meet_block(id, count, "sync_some");
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
    check_race(row, 16, false, "load_matrix4");
    self->in[0] = row;
    if (transposed) meet_warp("load_matrix4_transposed", compute_load<true>, true);
    else meet_warp("load_matrix4", compute_load<false>, true);
    memcpy(r, self->out, sizeof self->out);
}

void mma(float* d, const u32* a, u32 b0, u32 b1, bool half) {
    SITE();
    memcpy(self->in, a, 16);
    self->in[4] = b0, self->in[5] = b1;
    self->d = d;
    if (half) meet_warp("mma_f16", compute_mma<widen_f16>, true);
    else meet_warp("mma_bf16", compute_mma<widen_bf16>, true);
}

// ---- copies and transaction barriers -------------------------------------------------------------
namespace {

// What a u64 in shared memory holds once barrier_init has been there.
struct Phase {
    u64 parity : 1, count : 11, left : 11, mark : 17, bytes : 24;
};
constexpr u64 MARK = 0x1b0a7;
constexpr int MOST_BYTES = (1 << 20) - 1;

Phase phase_at(u32 address, const char* what) {
    check_shared(address, 8, 8, what);
    check_race(address, 8, false, what);
    Phase phase;
    memcpy(&phase, at(address), 8);
    if (phase.mark != MARK) fault("%s: no barrier_init at shared address %u", what, address);
    return phase;
}

// Writes the barrier back; where the phase is complete, begins the next and wakes who waits.
void settle(u32 address, Phase phase) {
    bool complete = phase.left == 0 && phase.bytes == 0;
    if (complete) phase.parity ^= 1u, phase.left = phase.count;
    memcpy(at(address), &phase, 8);
    for (int i = 0; complete && i < thread_count; i++) {
        Thread& t = threads[i];
        if (t.state == State::PHASE && t.phase == address) t.state = State::READY;
    }
}

void arrive_at(u32 address, u32 bytes, const char* what) {
    Phase phase = phase_at(address, what);
    if (phase.left == 0) fault("%s: more arrivals than the barrier's %d", what, int(phase.count));
    if (phase.bytes + bytes > MOST_BYTES) fault("%s: more than %d bytes", what, MOST_BYTES);
    phase.left -= 1;
    phase.bytes += bytes;
    races.arrive(number(self), address);
    settle(address, phase);
}

void land(const Copy& copy) {
    if (copy.valid) memcpy(at(copy.to), copy.from, copy.bytes);
    else memset(at(copy.to), 0, copy.bytes);
}

// Bulk copies arrive in any order, as late as possible: a missing wait meets poison.
void land_bulk() {
    size_t i = launch->seed < 2 ? 0 : pick(static_cast<u32>(bulk.size()));
    Copy copy = bulk[i];
    bulk.erase(bulk.begin() + static_cast<long>(i));
    land(copy);
    Phase phase;
    memcpy(&phase, at(copy.barrier), 8);
    if (phase.mark != MARK) {
        self = nullptr;
        fault_at(nullptr, "copy_bulk: its barrier at %u was overwritten", copy.barrier);
    }
    if (phase.bytes < copy.bytes) {
        self = nullptr;
        fault_at(nullptr, "copy_bulk: %u bytes came, the barrier at %u expects %d more",
                 copy.bytes, copy.barrier, int(phase.bytes));
    }
    phase.bytes -= copy.bytes;
    races.land(copy.to, copy.bytes, copy.barrier, copy.site);
    settle(copy.barrier, phase);
}

}  // namespace

u32 shared_address(const void* p) {
    const u8* byte = static_cast<const u8*>(p);
    if (!own(byte, dynamic_memory, __stop_emulated_shared)) {
        SITE();
        fault("shared_address: %p is not in shared memory", p);
    }
    return static_cast<u32>(byte - dynamic_memory);
}

void load_shared16(void* to, u32 from) {
    SITE();
    check_shared(from, 16, 16, "load_shared16");
    check_race(from, 16, false, "load_shared16");
    memcpy(to, at(from), 16);
}

void copy_async16(u32 to, const void* from, bool valid) {
    SITE();
    check_shared(to, 16, 16, "copy_async16");
    if (valid) {
        if (reinterpret_cast<u64>(from) % 16 != 0) {
            fault("copy_async16: source must be a multiple of 16 (got %p)", from);
        }
        check_global(from, 16, false, "copy_async16");
    }
    check_race(to, 16, true, "copy_async16");
    memset(at(to), POISON, 16);
    self->copies.push_back({to, static_cast<const u8*>(from), 16, 0, valid, self->committed,
                            offset(self->site)});
}

void copy_async_commit() { self->committed++; }

void copy_async_wait(int left) {
    SITE();
    std::vector<Copy>& copies = self->copies;
    size_t n = 0;
    // Groups 0 .. committed - 1 are committed; the last `left` of them may still be under way.
    while (n < copies.size() && static_cast<int>(copies[n].group) <
           static_cast<int>(self->committed) - left) {
        check_race(copies[n].to, 16, true, "copy_async16");
        land(copies[n++]);
    }
    copies.erase(copies.begin(), copies.begin() + static_cast<long>(n));
}

void barrier_init(u32 barrier, int count) {
    SITE();
    check_shared(barrier, 8, 8, "barrier_init");
    if (count < 1 || count > MOST_THREADS) {
        fault("barrier_init: count must be 1 to %d (got %d)", MOST_THREADS, count);
    }
    check_race(barrier, 8, true, "barrier_init");
    Phase phase = {0, static_cast<u64>(count), static_cast<u64>(count), MARK, 0};
    memcpy(at(barrier), &phase, 8);
}

void barrier_expect(u32 barrier, u32 bytes) {
    SITE();
    arrive_at(barrier, bytes, "barrier_expect");
}

void barrier_arrive(u32 barrier) {
    SITE();
    arrive_at(barrier, 0, "barrier_arrive");
}

void barrier_wait(u32 barrier, u32 parity) {
    SITE();
    if (parity > 1) fault("barrier_wait: parity must be 0 or 1 (got %u)", parity);
    Phase phase = phase_at(barrier, "barrier_wait");
    if (phase.parity == parity) {
        self->doing = "barrier_wait";
        self->phase = barrier;
        give_way(State::PHASE);
    }
    races.wait(number(self), barrier);
}

void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
    SITE();
    if (bytes == 0 || bytes % 16 != 0 || reinterpret_cast<u64>(from) % 16 != 0) {
        fault("copy_bulk: bytes and source must be multiples of 16 (got %u, %p)", bytes, from);
    }
    check_shared(to, bytes, 16, "copy_bulk");
    check_global(from, bytes, false, "copy_bulk");
    phase_at(barrier, "copy_bulk");
    check_race(to, bytes, true, "copy_bulk");
    memset(at(to), POISON, bytes);
    bulk.push_back({to, static_cast<const u8*>(from), bytes, barrier, true, 0,
                    offset(self->site)});
}

void wait_for_previous() { self->waited = true; }

u32 arrive(u32* counter) {
    SITE();
    check_global(counter, 4, true, "arrive");
    between.arrive(races, number(self));
    return (*counter)++;
}

// ---- running -------------------------------------------------------------------------------------
namespace {

void make_stacks() {
    for (int i = 0; i < thread_count; i++) {
        if (threads[i].fiber.stack == nullptr) threads[i].fiber.stack = new_stack();
    }
}

constexpr int CAUGHT[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
struct sigaction before[4];

void catch_signals() {
    static u8 stack[64 * 1024];
    stack_t alternate = {stack, 0, sizeof stack};
    sigaltstack(&alternate, nullptr);
    struct sigaction action = {};
    action.sa_sigaction = crashed;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < 4; i++) sigaction(CAUGHT[i], &action, &before[i]);
}

void release_signals() {
    for (int i = 0; i < 4; i++) sigaction(CAUGHT[i], &before[i], nullptr);
}

void start_block() {
    u8* end = __stop_emulated_shared;
    memset(dynamic_memory, POISON, static_cast<size_t>(LEAD + launch->shared));
    memset(dynamic_memory + LEAD + launch->shared, CANARY, GUARD);
    u8* statics = dynamic_memory + sizeof dynamic_memory;
    memset(statics, POISON, static_cast<size_t>(end - statics));
    alive = thread_count;
    races.start(thread_count, static_cast<u64>(end - dynamic_memory));
    between.start_block();
    bulk.clear();
    memset(meetings, 0, sizeof meetings);
    for (int i = 0; i < thread_count; i++) {
        Thread& t = threads[i];
        t.index = {static_cast<unsigned>(i), 0, 0};
        t.state = State::READY;
        t.doing = "";
        t.site = __ehdr_start;
        t.committed = 0;
        t.waited = false;
        t.copies.clear();
        start_fiber(t.fiber, thread_main);
    }
    for (int w = 0; w * LANES < thread_count; w++) {
        warps[w] = {"", 0, std::min(LANES, thread_count - w * LANES)};
    }
}

[[noreturn]] void stuck() {
    int at = say(0, "%s: block (%u, %u, %u): no thread can go on", launch->kernel, blockIdx.x,
                 blockIdx.y, blockIdx.z);
    for (int i = 0, j; i < thread_count; i = j) {
        const Thread& t = threads[i];
        for (j = i; j < thread_count; j++) {
            if (threads[j].state != t.state || threads[j].site != t.site) break;
        }
        bool ended = t.state == State::EXITED;
        at = say(at, "\n    threads %d to %d: %s", i, j - 1, ended ? "ended" : t.doing);
        if (!ended) at = say(at, " at @0x%llx", offset(t.site));
    }
    longjmp(leave, 1);
}

void resume(Thread& t) {
    self = &t;
    threadIdx = t.index;
    switch_fiber(scheduler, t.fiber);
    self = nullptr;
}

// Runs one warp until none of its lanes can go on: as far ahead of the others as it gets.
bool run_warp(int w, bool backwards, bool shuffled) {
    Thread* lanes = threads + w * LANES;
    int count = warps[w].lanes;
    bool any = false;
    for (bool more = true; more;) {
        more = false;
        int turn = shuffled ? static_cast<int>(pick(static_cast<u32>(count))) : 0;
        for (int i = 0; i < count; i++) {
            Thread& t = lanes[backwards ? count - 1 - i : (i + turn) % count];
            if (t.state != State::READY) continue;
            resume(t);
            any = more = true;
        }
    }
    return any;
}

void run_block() {
    start_block();
    bool backwards = launch->seed == 1, shuffled = launch->seed > 1;
    int count = (thread_count + LANES - 1) / LANES;
    while (alive > 0) {
        bool any = false;
        int turn = shuffled ? static_cast<int>(pick(static_cast<u32>(count))) : 0;
        for (int i = 0; i < count; i++) {
            int w = backwards ? count - 1 - i : (i + turn) % count;
            any |= run_warp(w, backwards, shuffled);
            if (shuffled && !bulk.empty() && pick(4) == 0) land_bulk();
        }
        open_meetings();
        if (any) continue;
        bool open = false;
        for (int i = 0; i < thread_count; i++) open |= threads[i].state == State::READY;
        if (open) continue;
        if (bulk.empty()) stuck();
        land_bulk();
    }
    if (!bulk.empty()) {
        fault_at(nullptr, "copy_bulk: the block (%u, %u, %u) ended before a copy did", blockIdx.x,
                 blockIdx.y, blockIdx.z);
    }
    for (int i = 0; i < GUARD; i++) {
        if (dynamic_memory[LEAD + launch->shared + i] != CANARY) {
            fault_at(nullptr, "block (%u, %u, %u) wrote %d bytes behind its shared memory",
                     blockIdx.x, blockIdx.y, blockIdx.z, i);
        }
    }
}

void run_grid() {
    u32 count = gridDim.x * gridDim.y * gridDim.z;
    std::vector<u32> order(count);
    for (u32 i = 0; i < count; i++) order[i] = launch->seed == 1 ? count - 1 - i : i;
    for (u32 i = 0; launch->seed > 1 && i < count; i++) {
        std::swap(order[i], order[i + pick(count - i)]);
    }
    for (u32 i : order) {
        blockIdx = {i % gridDim.x, i / gridDim.x % gridDim.y, i / gridDim.x / gridDim.y};
        run_block();
    }
}

}  // namespace

int run(const Launch& given, void (*body)()) {
    launch = &given;
    kernel_body = body;
    thread_count = given.threads;
    gridDim = {given.grid[0], given.grid[1], given.grid[2]};
    blockDim = {static_cast<unsigned>(given.threads), 1, 1};
    chance = 0x9e3779b97f4a7c15ull * (given.seed + 1);
    last_range = nullptr;
    self = nullptr;
    catch_signals();
    if (setjmp(leave) != 0) {
        self = nullptr;
        release_signals();
        return 1;
    }
    if (thread_count < 1 || thread_count > MOST_THREADS || given.shared > LARGEST_SHARED) {
        fault_at(nullptr, "threads must be 1 to 1024 and shared memory 0 to %d (got %d, %d)",
                 LARGEST_SHARED, thread_count, given.shared);
    }
    if (dynamic_memory != __start_emulated_shared) fault_at(nullptr, "machine.o must be linked first");
    make_stacks();
    between.start_launch();
    run_grid();
    release_signals();
    return 0;
}

}  // namespace emulator
