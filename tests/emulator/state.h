// Shared by the parts of the machine: threads and blocks, faults, memory checks.
#pragma once

#include <signal.h>

#include <algorithm>
#include <vector>

#include "fiber.h"
#include "machine.h"
#include "races.h"

#pragma GCC visibility push(hidden)

extern "C" {
// Linker symbols: begin and end of all shared memory, and of this library's image.
extern unsigned char __start_emulated_shared[], __stop_emulated_shared[], __ehdr_start[], _end[];
}

namespace emulator {

constexpr u8 POISON = 0xff, CANARY = 0xfd;
constexpr int MOST_THREADS = 1024, LANES = 32, BARRIERS = 16, MOST_BLOCKS = 8;

enum class State { READY, WARP, BLOCK, PHASE, CLUSTER, EXITED };

// An address in the shared memory of one block of the cluster.
struct Spot {
    int rank;
    u32 address;
};

// A copy_async16 in flight.
struct Piece {
    u32 to;
    const u8* from;
    bool valid;
    u32 group;  // number of the commit that it belongs to
};

struct Block;

struct Thread {
    Fiber fiber;
    Block* block;
    Index index;
    int number;         // in the cluster
    State state;
    const char* doing;  // the collective or barrier it waits in
    const void* site;   // code address of its last checked operation
    u32 in[6];          // operands of a warp's collective,
    float* d;           // accumulator of a matrix product,
    u32 out[4];         // and results
    int barrier;        // State::BLOCK: the id of the barrier it waits at
    u32 phase;          // State::PHASE: the address of the transaction barrier it waits at
    bool arrived;       // has arrived at the cluster's barrier but not waited yet
    u32 meeting;        // number of that cluster barrier
    u32 committed;      // calls of copy_async_commit
    bool waited;        // has called wait_for_previous
    bool let, let_early;  // has called let_next_start; before wait_for_previous
    std::vector<Piece> pieces;
    std::vector<u32> inits;  // barriers initialised since its last barrier_init_done
};

struct Warp {
    const char* doing;   // the collective in which lanes wait for the others
    int arrived, lanes;  // lanes that wait there; all lanes
    int away;            // lanes that have ended or wait at a barrier of the block
};

// A barrier of the block, by id.
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
    std::vector<u8> memory;  // its shared memory while another block's is at dynamic_memory
};

extern Block blocks[MOST_BLOCKS];  // of the cluster
extern int block_count, thread_count;
extern Block* here;    // the block whose shared memory is at dynamic_memory now
extern Thread* self;   // the running thread
extern const Launch* launch;
extern Races races;    // on shared memory
extern Global between; // races on device memory
extern const Range* last_range;  // the range of launch->memory in which an access was found last

u32 pick(u32 n);
void give_way(State state);

// ---- faults ------------------------------------------------------------------------------------
int say(int at, const char* format, ...);
u64 offset(const void* site);
[[noreturn]] void leave();
[[noreturn]] void fault_at(const void* site, const char* format, ...);
// The name of a thread or a copy engine in a message.
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
// Checks an address made by cluster_address: its block must have started and not ended.
Spot check_remote(u32 remote, u32 bytes, u32 alignment, const char* what);
void check_race(Spot spot, u32 bytes, bool write, const char* what);
void tell_race(Spot spot, const Races::Place& other, const char* what);
void check_global(const void* p, u64 bytes, bool write, const char* what);
void count_prefetch(const void* p, u32 bytes);

// ---- copies and meetings -------------------------------------------------------------------------
void start_copies();
void start_received();
bool copies_under_way();
void check_copies_of(const Block& block);
void check_copies_of(const Thread& thread);
bool land_copy();  // completes a copy; returns whether a thread can go on because of it
void open_meetings(Block& block);
void start_meetings();
void open_cluster();

}  // namespace emulator

#pragma GCC visibility pop
