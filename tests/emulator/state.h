// What the parts of the machine share: its threads and blocks, its faults and the checks of memory.
#pragma once

#include <signal.h>

#include <algorithm>
#include <vector>

#include "fiber.h"
#include "machine.h"
#include "races.h"

#pragma GCC visibility push(hidden)

extern "C" {
// The ends of this library and of its statically allocated shared memory, from the linker.
extern unsigned char __start_emulated_shared[], __stop_emulated_shared[], __ehdr_start[], _end[];
}

namespace emulator {

constexpr u8 POISON = 0xff, CANARY = 0xfd;
constexpr int MOST_THREADS = 1024, LANES = 32, BARRIERS = 16, MOST_BLOCKS = 8;

enum class State { READY, WARP, BLOCK, PHASE, CLUSTER, EXITED };

// A place in the shared memory of one block of the cluster.
struct Spot {
    int rank;
    u32 address;
};

// A copy_async16 under way.
struct Piece {
    u32 to;
    const u8* from;
    bool valid;
    u32 group;
};

struct Block;

struct Thread {
    Fiber fiber;
    Block* block;
    Index index;
    int number;         // in the cluster
    State state;
    const char* doing;  // the collective it waits in
    const void* site;   // where in the kernel
    u32 in[6];          // operands of the warp's collective
    float* d;
    u32 out[4];
    int barrier;        // State::BLOCK: which
    u32 phase;          // State::PHASE: which barrier
    bool arrived;       // at the cluster's barrier, where it has not waited yet
    u32 meeting;        // which of the cluster's meetings that is
    u32 committed;
    bool waited;
    std::vector<Piece> pieces;
    std::vector<u32> inits;  // barriers it has made since barrier_init_done
};

struct Warp {
    const char* doing;
    int arrived, lanes;
    int away;  // of them in a barrier of the block, or ended
};

struct Meeting {
    int arrived, wanted;
    const char* doing;
};

struct Block {
    int rank;
    Index index;
    Thread* threads;
    Warp warps[LANES];
    Meeting meetings[BARRIERS];
    int alive;
    std::vector<u8> memory;  // while another block has the window
};

extern Block blocks[MOST_BLOCKS];  // of the cluster
extern int block_count, thread_count;
extern Block* here;    // whose memory lies at dynamic_memory, where kernels find it
extern Thread* self;   // who runs
extern const Launch* launch;
extern Races races;
extern Global between;
extern const Range* last_range;  // found of launch->memory

u32 pick(u32 n);
void give_way(State state);

// ---- faults ------------------------------------------------------------------------------------
int say(int at, const char* format, ...);
u64 offset(const void* site);
[[noreturn]] void leave();
[[noreturn]] void fault_at(const void* site, const char* format, ...);
// A thread or a copy engine, as a message names it.
const char* named(int who);
void crashed(int signal, siginfo_t* info, void* context);
#define fault(...) fault_at(self->site, __VA_ARGS__)
#define SITE() (self->site = static_cast<u8*>(__builtin_return_address(0)) - 1)

// ---- memory ------------------------------------------------------------------------------------
void enter(Block& block);
u8* at(Spot spot);
inline u8* at(u32 address) { return dynamic_memory + address; }
inline Spot own(u32 address) { return {self->block->rank, address}; }

void check_shared(u32 address, u32 bytes, u32 alignment, const char* what);
// Where an address of the cluster's space is, of a block that has started and not ended.
Spot check_remote(u32 remote, u32 bytes, u32 alignment, const char* what);
void check_race(Spot spot, u32 bytes, bool write, const char* what);
void tell_race(Spot spot, const Races::Place& other, const char* what);
void check_global(const void* p, u64 bytes, bool write, const char* what);

// ---- copies and meetings -------------------------------------------------------------------------
void start_copies();
bool copies_under_way();
void check_copies_of(const Block& block);
bool land_copy();  // whether it has woken anybody
void open_meetings(Block& block);
void start_meetings();
void open_cluster();

}  // namespace emulator

#pragma GCC visibility pop
