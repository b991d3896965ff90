// Shared memory, the checks of every access, and the messages of faults. This file must be linked
// first, because dynamic shared memory has to be the first object of the shared memory's section.
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <ucontext.h>

#include "state.h"

namespace emulator {

__attribute__((section("emulated_shared"), aligned(1024))) u8
    dynamic_memory[LEAD + LARGEST_SHARED + GUARD];

// ---- faults ------------------------------------------------------------------------------------
namespace {

int say(int at, const char* format, va_list list) {
    int left = launch->message_bytes - at;
    if (left <= 1) return at;
    int n = vsnprintf(launch->message + at, static_cast<size_t>(left), format, list);
    return at + std::min(n, left - 1);
}

}  // namespace

int say(int at, const char* format, ...) {
    va_list list;
    va_start(list, format);
    at = say(at, format, list);
    va_end(list);
    return at;
}

// A code address as an offset in this library, which _placed in emulation.py translates to a line.
u64 offset(const void* site) {
    return static_cast<u64>(static_cast<const u8*>(site) - __ehdr_start);
}

void fault_at(const void* site, const char* format, ...) {
    int at = say(0, "%s: ", launch->kernel);
    if (self != nullptr) {
        at = say(at, "block (%u, %u, %u) thread %u at @0x%llx: ", blockIdx.x, blockIdx.y,
                 blockIdx.z, self->index.x, offset(site));
    }
    va_list list;
    va_start(list, format);
    say(at, format, list);
    va_end(list);
    leave();
}

const char* named(int who) {
    static char name[64];
    bool engine = who >= races.threads();
    int rank = engine ? (who - races.threads()) / 2 : who / thread_count;
    int n = engine ? snprintf(name, sizeof name, "a copy")
                   : snprintf(name, sizeof name, "thread %d", who % thread_count);
    if (block_count > 1) {
        snprintf(name + n, sizeof name - static_cast<size_t>(n), " of block %d of the cluster", rank);
    }
    return name;
}

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

// ---- switching between blocks --------------------------------------------------------------------
// In a kernel, shared memory has the same addresses in every block. So when a block of a cluster is
// to run, its shared memory is copied to these addresses, and that of the block before it to a buffer.
namespace {

struct Part {
    u8* begin;
    size_t bytes;
};

void move(u8* memory, bool out) {
    u8* statics = dynamic_memory + sizeof dynamic_memory;
    const Part parts[] = {
        {dynamic_memory, static_cast<size_t>(LEAD + launch->shared + GUARD)},
        {statics, static_cast<size_t>(__stop_emulated_shared - statics)},
    };
    for (const Part& part : parts) {
        u8* there = memory + (part.begin - dynamic_memory);
        memcpy(out ? there : part.begin, out ? part.begin : there, part.bytes);
    }
}

}  // namespace

void enter(Block& block) {
    blockIdx = block.index;
    if (&block == here) return;
    if (here != nullptr) {
        move(here->memory.data(), true);
        move(block.memory.data(), false);
    }
    here = &block;
}

u8* at(Spot spot) {
    Block& block = blocks[spot.rank];
    return (&block == here ? dynamic_memory : block.memory.data()) + spot.address;
}

const Range* last_range;

// ---- checks --------------------------------------------------------------------------------------
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

Spot check_remote(u32 remote, u32 bytes, u32 alignment, const char* what) {
    int rank = static_cast<int>(remote >> RANK_SHIFT) - 1;
    if (rank < 0 || rank >= block_count) {
        fault("%s: the address must be one of cluster_address (got %u)", what, remote);
    }
    Spot spot = {rank, remote & ((1u << RANK_SHIFT) - 1)};
    check_shared(spot.address, bytes, alignment, what);
    if (blocks[rank].alive == 0) fault("%s: block %d of the cluster has ended", what, rank);
    if (!races.has_begun(self->number, rank)) {
        fault("%s: block %d of the cluster may not have started, no cluster_wait lies before", what,
              rank);
    }
    return spot;
}

// Notes an access of the running thread to shared memory; faults if it races with another one.
void check_race(Spot spot, u32 bytes, bool write, const char* what) {
    tell_race(spot, races.access(self->number, spot.rank, spot.address, bytes, write,
                                 offset(self->site)), what);
}

void tell_race(Spot spot, const Races::Place& other, const char* what) {
    if (other.thread < 0) return;
    fault("%s: a race at shared address %u: %s %s it at @0x%llx and no barrier lies between", what,
          spot.address, named(other.thread), other.wrote ? "wrote" : "read", other.site);
}

namespace {

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

bool within(const u8* p, const u8* begin, const u8* end) { return p >= begin && p < end; }

// Checks an access of device memory by the running thread, apart from races.
const Range* check_range(const void* p, u64 bytes, bool write, const char* what) {
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
    return range;
}

}  // namespace

void check_global(const void* p, u64 bytes, bool write, const char* what) {
    if (!(check_range(p, bytes, write, what)->flags & WRITABLE)) return;
    u64 where = reinterpret_cast<u64>(p);
    Races::Place other = write ? between.write(races, self->number, where, bytes, offset(self->site))
                               : between.read(races, self->number, where, bytes);
    if (other.thread < 0) return;
    fault("%s: a race in device memory: %s, or of another, wrote it at @0x%llx and nothing orders "
          "the two", what, named(other.thread), other.site);
}

void count_prefetch(const void* p, u32 bytes) {
    const Range* range = find_range(static_cast<const u8*>(p), bytes);
    if (!(range->flags & COUNTED)) return;
    u8* first = range->begin + (static_cast<const u8*>(p) - range->begin);
    for (u32 i = 0; i < bytes; i++) first[i]++;
}

u32 shared_address(const void* p) {
    const u8* byte = static_cast<const u8*>(p);
    if (!within(byte, dynamic_memory, __stop_emulated_shared)) {
        SITE();
        fault("shared_address: %p is not in shared memory", p);
    }
    return static_cast<u32>(byte - dynamic_memory);
}

u32 cluster_address(u32 local, u32 rank) {
    SITE();
    if (rank >= static_cast<u32>(block_count)) {
        fault("cluster_address: rank must be less than %d (got %u)", block_count, rank);
    }
    if (local >> RANK_SHIFT != 0) fault("cluster_address: not an address of this block, %u", local);
    return rank + 1 << RANK_SHIFT | local;
}

void load_shared(void* to, u32 from, u32 bytes) {
    SITE();
    const char* name = bytes == 4   ? "load_shared4"
                       : bytes == 8 ? "load_shared8"
                                    : "load_shared16";
    check_shared(from, bytes, bytes, name);
    check_race(own(from), bytes, false, name);
    memcpy(to, at(from), bytes);
}

void store_shared16(u32 to, const void* value) {
    SITE();
    check_shared(to, 16, 16, "store_shared16");
    check_race(own(to), 16, true, "store_shared16");
    memcpy(at(to), value, 16);
}

void load_cluster16(void* to, u32 remote) {
    SITE();
    Spot from = check_remote(remote, 16, 16, "load_cluster16");
    check_race(from, 16, false, "load_cluster16");
    memcpy(to, at(from), 16);
}

void wait_for_previous() { self->waited = true; }

void let_next_start() {
    self->let = true;
    self->let_early |= !self->waited;
}

u32 arrive(u32* counter) {
    SITE();
    check_range(counter, 4, true, "arrive");
    if (block_count > 1) races.count_at(self->number, reinterpret_cast<u64>(counter));
    between.arrive(races, self->number);
    return (*counter)++;
}

// ---- hooks -------------------------------------------------------------------------------------
// With -fsanitize=thread, g++ inserts a call of one of these functions before every load and store
// of a kernel's code. The sanitizer's own library is not linked.
namespace {

// Checks a load or store. Inlined into each hook, since these are called more often than anything.
[[gnu::always_inline]] inline void access(const void* address, u64 bytes, bool write,
                                          const void* site) {
    if (self == nullptr) return;
    const u8* p = static_cast<const u8*>(address);
    const u8* stack = self->fiber.stack;
    if (within(p, stack, stack + STACK)) return;
    self->site = static_cast<const u8*>(site) - 1;
    const char* what = write ? "store" : "load";
    if (within(p, dynamic_memory, __stop_emulated_shared)) {
        u32 where = static_cast<u32>(p - dynamic_memory);
        check_shared(where, static_cast<u32>(bytes), 1, what);
        check_race(own(where), static_cast<u32>(bytes), write, what);
    } else if (!within(p, __ehdr_start, _end)) {
        if (reinterpret_cast<u64>(p) % bytes != 0) {
            fault("%s: address must be a multiple of %llu (got %p)", what, bytes, address);
        }
        check_global(p, bytes, write, what);
    }
}

}  // namespace
}  // namespace emulator

#define HOOKS(n)                                                                          \
    void __tsan_read##n(void* p) {                                                        \
        emulator::access(p, n, false, __builtin_return_address(0));                       \
    }                                                                                     \
    void __tsan_write##n(void* p) {                                                       \
        emulator::access(p, n, true, __builtin_return_address(0));                        \
    }                                                                                     \
    void __tsan_unaligned_read##n(void* p) {                                              \
        emulator::access(p, n, false, __builtin_return_address(0));                       \
    }                                                                                     \
    void __tsan_unaligned_write##n(void* p) {                                             \
        emulator::access(p, n, true, __builtin_return_address(0));                        \
    }

extern "C" {
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
void __tsan_read_range(void* p, unsigned long n) {
    emulator::access(p, n, false, __builtin_return_address(0));
}
void __tsan_write_range(void* p, unsigned long n) {
    emulator::access(p, n, true, __builtin_return_address(0));
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
