// The emulated multiprocessor: runs clusters one after another, and interleaves the blocks of a
// cluster. See machine.h.
#include "machine.h"

#include <setjmp.h>
#include <signal.h>
#include <string.h>

#include "state.h"

Index threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

Block blocks[MOST_BLOCKS];
int block_count, thread_count;
Block* here;
Thread* self;
const Launch* launch;
Races races;
Global between;

namespace {

Thread threads[MOST_BLOCKS * MOST_THREADS];
void (*kernel_body)();
jmp_buf left;
u64 chance;
bool backwards, shuffled;  // order of threads and blocks; neither: ascending
int late;                  // in each block, the warp that is late, or -1
bool late_runs;            // now, since nothing else can go on
Fiber scheduler;

}  // namespace

u32 pick(u32 n) {
    chance ^= chance << 13, chance ^= chance >> 7, chance ^= chance << 17;
    return static_cast<u32>((chance >> 20) % n);
}

void leave() { longjmp(left, 1); }

// ---- switching between lanes ---------------------------------------------------------------------
namespace {

// One pass through the lanes of the running warp. A lane that has to wait switches directly to the
// next lane; going through the scheduler would take twice as many switches.
struct Pass {
    Thread* lanes;
    int count, left, at, step;

    Thread* next() {
        while (left-- > 0) {
            Thread* t = lanes + at;
            at += step;
            if (at == count) at = 0;
            if (t->state == State::READY) return t;
        }
        return nullptr;
    }
};
Pass pass;

void resume(Fiber& from, Thread& t) {
    self = &t;
    threadIdx = t.index;
    switch_fiber(from, t.fiber);
}

// Switches to the next lane of the pass or, after the last one, back to the scheduler.
void go_on(Fiber& from) {
    if (Thread* next = pass.next()) return resume(from, *next);
    self = nullptr;
    switch_fiber(from, scheduler);
}

void thread_main() {
    kernel_body();
    if (self->arrived) fault("ended between cluster_arrive and cluster_wait");
    check_copies_of(*self);
    self->state = State::EXITED;
    self->block->alive--;
    self->block->warps[self->index.x / LANES].away++;
    open_cluster();
    go_on(self->fiber);
}

}  // namespace

void give_way(State state) {
    self->state = state;
    go_on(self->fiber);
}

namespace {

// Runs one warp until none of its lanes can go on. It gets as far ahead of other warps as it can, so
// that missing synchronisation shows. Returns whether any lane ran.
bool run_warp(Block& block, int w) {
    Thread* lanes = block.threads + w * LANES;
    int count = block.warps[w].lanes;
    for (bool any = false;; any = true) {
        int turn = shuffled ? static_cast<int>(pick(static_cast<u32>(count))) : 0;
        pass = {lanes, count, count, backwards ? count - 1 : turn, backwards ? -1 : 1};
        Thread* first = pass.next();
        if (first == nullptr) return any;
        resume(scheduler, *first);
    }
}

// Runs every warp of a block once. Returns whether any lane ran.
bool run_warps(Block& block) {
    int count = (thread_count + LANES - 1) / LANES;
    bool any = false;
    int turn = shuffled ? static_cast<int>(pick(static_cast<u32>(count))) : 0;
    for (int i = 0; i < count; i++) {
        int w = backwards ? count - 1 - i : (i + turn) % count;
        if (w == late && !late_runs) continue;
        bool ran = run_warp(block, w);
        any |= ran;
        if (w == late && ran) late_runs = false;
        if (shuffled && copies_under_way() && pick(4) == 0) land_copy();
    }
    open_meetings(block);
    return any;
}

// ---- a block ---------------------------------------------------------------------------------------
void start_thread(Thread& t, Block& block, int i) {
    t.fiber.stack = stack_of(*launch->stacks, block.rank * thread_count + i);
    t.block = &block;
    t.index = {static_cast<unsigned>(i), 0, 0};
    t.number = block.rank * thread_count + i;
    t.state = State::READY;
    t.doing = "";
    t.site = __ehdr_start;
    t.committed = 0;
    t.waited = t.let = t.let_early = t.arrived = false;
    t.pieces.clear();
    t.inits.clear();
    start_fiber(t.fiber, t.number, thread_main);
}

void start_block(Block& block, int rank, Index index) {
    block.rank = rank;
    block.index = index;
    block.threads = threads + rank * thread_count;
    block.alive = thread_count;
    memset(block.meetings, 0, sizeof block.meetings);
    size_t all = static_cast<size_t>(__stop_emulated_shared - dynamic_memory);
    if (block_count > 1) block.memory.resize(all);
    enter(block);
    memset(dynamic_memory, POISON, static_cast<size_t>(LEAD + launch->shared));
    memset(dynamic_memory + LEAD + launch->shared, CANARY, GUARD);
    memset(dynamic_memory + sizeof dynamic_memory, POISON, all - sizeof dynamic_memory);
    for (int i = 0; i < thread_count; i++) start_thread(block.threads[i], block, i);
    for (int w = 0; w * LANES < thread_count; w++) {
        block.warps[w] = {"", 0, std::min(LANES, thread_count - w * LANES), 0};
    }
}

void check_left_open(const Block& block, u32 begin, u32 end) {
    Races::Place other = races.left_open(block.rank, begin, end);
    if (other.thread < 0) return;
    fault_at(nullptr, "the block (%u, %u, %u) ended and nothing makes it wait for the others: %s %s "
             "its shared address %u at @0x%llx", block.index.x, block.index.y, block.index.z,
             named(other.thread), other.wrote ? "wrote" : "read", other.address, other.site);
}

// A block in which a thread waits for the previous kernel must also let the next one start.
void check_let(const Block& block) {
    bool waited = false, let = false;
    for (int i = 0; i < thread_count; i++) {
        waited |= block.threads[i].waited;
        let |= block.threads[i].let;
    }
    if (!waited || let) return;
    fault_at(nullptr, "the block (%u, %u, %u) ended without let_next_start", block.index.x,
             block.index.y, block.index.z);
}

void end_block(const Block& block) {
    check_copies_of(block);
    check_let(block);
    const u8* guard = dynamic_memory + LEAD + launch->shared;
    // Comparing the guard with itself shifted by one byte shows whether all its bytes are equal.
    bool untouched = guard[0] == CANARY && memcmp(guard, guard + 1, GUARD - 1) == 0;
    for (int i = 0; !untouched && i < GUARD; i++) {
        if (guard[i] != CANARY) {
            fault_at(nullptr, "block (%u, %u, %u) wrote %d bytes behind its shared memory",
                     blockIdx.x, blockIdx.y, blockIdx.z, i);
        }
    }
    if (block_count == 1) return;
    check_left_open(block, LEAD, static_cast<u32>(LEAD + launch->shared));
    check_left_open(block, sizeof dynamic_memory,
                    static_cast<u32>(__stop_emulated_shared - dynamic_memory));
}

// ---- a cluster -------------------------------------------------------------------------------------
[[noreturn]] void stuck() {
    int at = say(0, "%s: no thread can go on", launch->kernel);
    for (int b = 0; b < block_count; b++) {
        const Block& block = blocks[b];
        at = say(at, "\n  block (%u, %u, %u)", block.index.x, block.index.y, block.index.z);
        for (int i = 0, j; i < thread_count; i = j) {
            const Thread& t = block.threads[i];
            for (j = i; j < thread_count; j++) {
                const Thread& other = block.threads[j];
                if (other.state != t.state || other.site != t.site) break;
            }
            bool ended = t.state == State::EXITED;
            at = say(at, "\n    threads %d to %d: %s", i, j - 1, ended ? "ended" : t.doing);
            if (!ended) at = say(at, " at @0x%llx", offset(t.site));
        }
    }
    leave();
}

bool ready(const Block& block) {
    for (int i = 0; i < thread_count; i++) {
        if (i / LANES == late && !late_runs) continue;
        if (block.threads[i].state == State::READY) return true;
    }
    return false;
}

// Runs a block as far as it gets; with a pseudo-random order, only for a few turns of its warps,
// because entering a block of a cluster copies its shared memory. Returns whether any lane ran.
bool run_block(Block& block) {
    if (block.alive == 0 || !ready(block)) return false;
    enter(block);
    u32 most = !shuffled || block_count == 1 ? ~0u : 1 + pick(4);
    bool any = false;
    for (u32 n = 0; n < most && block.alive > 0 && run_warps(block); n++) any = true;
    if (block.alive == 0) end_block(block);
    return any;
}

bool any_ready() {
    for (int b = 0; b < block_count; b++) {
        if (ready(blocks[b])) return true;
    }
    return false;
}

void run_cluster(Index first) {
    here = nullptr;
    races.start_cluster();
    between.start_cluster();
    start_copies();
    start_meetings();
    for (int b = 0; b < block_count; b++) {
        start_block(blocks[b], b, {first.x + static_cast<unsigned>(b), first.y, first.z});
    }
    for (int alive = 1; alive > 0;) {
        bool any = false;
        int turn = shuffled ? static_cast<int>(pick(static_cast<u32>(block_count))) : 0;
        for (int i = 0; i < block_count; i++) {
            int b = backwards ? block_count - 1 - i : (i + turn) % block_count;
            any |= run_block(blocks[b]);
        }
        alive = 0;
        for (int b = 0; b < block_count; b++) alive += blocks[b].alive;
        if (any || alive == 0 || any_ready()) continue;
        if (copies_under_way()) {
            while (!land_copy() && copies_under_way()) continue;
        } else {
            if (late < 0 || late_runs) stuck();
            late_runs = true;
        }
    }
}

void run_grid() {
    u32 along = gridDim.x / static_cast<u32>(block_count);
    u32 count = along * gridDim.y * gridDim.z;
    std::vector<u32> order(count);
    for (u32 i = 0; i < count; i++) order[i] = backwards ? count - 1 - i : i;
    for (u32 i = 0; shuffled && i < count; i++) {
        std::swap(order[i], order[i + pick(count - i)]);
    }
    for (u32 i : order) {
        run_cluster({i % along * static_cast<u32>(block_count), i / along % gridDim.y,
                     i / along / gridDim.y});
    }
}

// ---- a launch --------------------------------------------------------------------------------------
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

void free_memory() {
    races.forget();
    for (Block& block : blocks) std::vector<u8>().swap(block.memory);
}

void check_launch() {
    if (thread_count < 1 || thread_count > MOST_THREADS || launch->shared > LARGEST_SHARED) {
        fault_at(nullptr, "threads must be 1 to 1024 and shared memory 0 to %d (got %d, %d)",
                 LARGEST_SHARED, thread_count, launch->shared);
    }
    if (block_count < 1 || block_count > MOST_BLOCKS) {
        fault_at(nullptr, "a cluster must be 1 to %d blocks (got %d)", MOST_BLOCKS, block_count);
    }
    if (gridDim.x % static_cast<u32>(block_count) != 0) {
        fault_at(nullptr, "the grid must be whole clusters of %d along x (got %u)", block_count,
                 gridDim.x);
    }
    if (dynamic_memory != __start_emulated_shared) {
        fault_at(nullptr, "memory.o must be linked first");
    }
}

}  // namespace

int run(const Launch& given, void (*body)()) {
    launch = &given;
    kernel_body = body;
    thread_count = given.threads;
    block_count = given.cluster;
    gridDim = {given.grid[0], given.grid[1], given.grid[2]};
    blockDim = {static_cast<unsigned>(given.threads), 1, 1};
    chance = 0x9e3779b97f4a7c15ull * (given.seed + 1);
    late = given.seed < LATE ? -1 : static_cast<int>(given.seed - LATE);
    late_runs = false;
    backwards = given.seed == 1;
    shuffled = given.seed > 1 && late < 0;
    last_range = nullptr;
    self = nullptr;
    catch_signals();
    if (setjmp(left) != 0) {
        self = nullptr;
        free_memory();
        release_signals();
        return 1;
    }
    check_launch();
    between.start_launch();
    start_received();
    races.start_launch(thread_count, block_count, static_cast<u32>(LEAD + launch->shared),
                       sizeof dynamic_memory,
                       static_cast<u64>(__stop_emulated_shared - dynamic_memory));
    run_grid();
    free_memory();
    release_signals();
    return 0;
}

}  // namespace emulator
