// Asynchronous copies, and the transaction barriers that count their bytes.
#include <stdint.h>
#include <string.h>

#include <deque>

#include "state.h"

// A checksum of all values that a launch has given to `received`, for tests.
extern "C" __attribute__((visibility("default"))) unsigned long long emulated_received;
unsigned long long emulated_received;

namespace emulator {
namespace {

// A bulk copy from device memory (`global`) to the sender's own block, or a store of 16 bytes (`held`)
// to any block of the cluster.
struct Copy {
    const char* what;
    int sender;  // rank of the block that issued it
    u32 clock;   // number among the copies of that block
    Spot to;
    u32 bytes;
    Spot barrier;
    const u8* global;
    u8 held[16];
    u64 site;
};
std::deque<Copy> under_way;

// The content of a transaction barrier, a u64 in shared memory, from barrier_init on. `bytes`: how
// many announced bytes have yet to arrive; negative if bytes have arrived before being announced.
struct Phase {
    u64 parity : 1, count : 11, left : 11, mark : 17;
    long long bytes : 24;
};
constexpr u64 MARK = 0x1b0a7;
constexpr int MOST_BYTES = (1 << 20) - 1;

Phase read_phase(Spot barrier) {
    Phase phase;
    memcpy(&phase, at(barrier), 8);
    return phase;
}

// Reads a barrier for the running thread. Faults if there is none, or if the thread cannot know that
// it has been initialised.
Phase phase_at(Spot barrier, const char* what) {
    check_shared(barrier.address, 8, 8, what);
    const bool known = races.knows(self->number, barrier.rank, barrier.address);
    if (!known) {
        tell_race(barrier, races.unseen(self->number, barrier.rank, barrier.address, 8), what);
    }
    Phase phase = read_phase(barrier);
    if (phase.mark != MARK) {
        fault("%s: no barrier_init at shared address %u", what, barrier.address);
    }
    if (!known && !races.is_published(barrier.rank, barrier.address)) {
        fault("%s: no barrier_init_done after barrier_init at shared address %u", what,
              barrier.address);
    }
    return phase;
}

// Notes that the running thread uses the barrier, as a read: a write that is not ordered after it
// is a race.
void note(Spot barrier) {
    races.access(self->number, barrier.rank, barrier.address, 8, false, offset(self->site));
}

// Checks the address of a barrier of any block.
Spot barrier_of(u32 remote, const char* what) {
    Spot barrier = check_remote(remote, 8, 8, what);
    phase_at(barrier, what);
    return barrier;
}

// Writes the barrier back. If its phase is complete, begins the next one and makes the threads that
// wait for it ready. Returns whether there were any.
bool settle(Spot barrier, Phase phase) {
    bool complete = phase.left == 0 && phase.bytes == 0;
    if (complete) {
        phase.parity ^= 1u, phase.left = phase.count;
        races.end_phase(barrier.rank, barrier.address);
    }
    memcpy(at(barrier), &phase, 8);
    bool woken = false;
    for (int i = 0; complete && i < thread_count; i++) {
        Thread& t = blocks[barrier.rank].threads[i];
        if (t.state != State::PHASE || t.phase != barrier.address) continue;
        t.state = State::READY;
        woken = true;
    }
    return woken;
}

void announce(Phase& phase, u32 bytes, const char* what) {
    if (bytes > MOST_BYTES || phase.bytes + bytes > MOST_BYTES) {
        fault("%s: more than %d bytes", what, MOST_BYTES);
    }
    phase.bytes += bytes;
}

void arrive_at(Spot barrier, u32 bytes, const char* what) {
    Phase phase = phase_at(barrier, what);
    note(barrier);
    if (phase.left == 0) fault("%s: more arrivals than the barrier's %d", what, int(phase.count));
    phase.left -= 1;
    announce(phase, bytes, what);
    if (phase.left == 0 && phase.bytes < 0) {
        fault("%s: %d bytes more have come than were announced", what, -int(phase.bytes));
    }
    races.arrive(self->number, barrier.rank, barrier.address);
    settle(barrier, phase);
}

void wait_at(u32 barrier, u32 parity, bool cluster, const char* what) {
    if (parity > 1) fault("%s: parity must be 0 or 1 (got %u)", what, parity);
    Phase phase = phase_at(own(barrier), what);
    note(own(barrier));
    if (phase.parity == parity) {
        self->doing = what;
        self->phase = barrier;
        give_way(State::PHASE);
        // A GPU polls the barrier: it might find the same parity again, and wait for ever.
        if (read_phase(own(barrier)).parity == parity) {
            fault("%s: the phase after this one has ended too, so that this one's end may be missed",
                  what);
        }
    }
    races.wait(self->number, self->block->rank, barrier, cluster);
}

// Checks that a copy may overwrite this memory. It is not enough that barriers order the copy after
// earlier reads: a load may only have been started until its thread calls `received`, and the barriers
// must order the copy after that call.
void check_overwritten(Spot to, u32 bytes, const char* what) {
    Races::Place other = races.unreceived(self->number, to.rank, to.address, bytes);
    check_race(to, bytes, true, what);
    if (other.thread < 0) return;
    fault("%s: %s read shared address %u at @0x%llx and no received lies between", what,
          named(other.thread), other.address, other.site);
}

// Checks that what threads have stored here cannot arrive after what the copy engine writes.
void check_fenced(Spot to, u32 bytes) {
    Races::Place other = races.unfenced(self->number, to.rank, to.address, bytes);
    if (other.thread < 0) return;
    fault("copy_bulk: %s wrote shared address %u at @0x%llx and no barrier_init_done lies between",
          named(other.thread), other.address, other.site);
}

// Begins a copy. From now until it lands, its destination holds poison: neither the old nor the new
// content can be read.
Copy& send(const char* what, Spot to, u32 bytes, Spot barrier) {
    check_overwritten(to, bytes, what);
    memset(at(to), POISON, bytes);
    int sender = self->block->rank;
    u32 clock = races.send(sender);
    u64 site = offset(self->site);
    races.read_by_copy(sender, clock, barrier.rank, barrier.address, 8, site);
    under_way.push_back({what, sender, clock, to, bytes, barrier, nullptr, {}, site});
    return under_way.back();
}

void land(const Copy& copy) {
    const u8* from = copy.held;
    if (copy.global != nullptr) from = copy.global;
    memcpy(at(copy.to), from, copy.bytes);
    races.land(copy.sender, copy.clock, copy.to.rank, copy.to.address, copy.bytes,
               copy.barrier.address, copy.site);
}

void land(const Piece& piece) {
    if (piece.valid) memcpy(at(piece.to), piece.from, 16);
    else memset(at(piece.to), 0, 16);
}

}  // namespace

// ---- bulk copies ---------------------------------------------------------------------------------
void start_copies() { under_way.clear(); }
void start_received() { emulated_received = 0; }
bool copies_under_way() { return !under_way.empty(); }

void check_copies_of(const Block& block) {
    for (const Copy& copy : under_way) {
        if (copy.to.rank != block.rank) continue;
        fault_at(nullptr, "%s: the block (%u, %u, %u) ended before a copy to it did", copy.what,
                 block.index.x, block.index.y, block.index.z);
    }
}

// Completes one copy: for seeds 0 and 1 the oldest, when no thread can go on without it; for others
// any, at any time. So a thread that does not wait for a copy reads poison, at least with 0 and 1.
bool land_copy() {
    size_t i = launch->seed < 2 ? 0 : pick(static_cast<u32>(under_way.size()));
    std::swap(under_way[i], under_way.front());
    Copy copy = under_way.front();
    under_way.pop_front();  // not erased from the middle: there may be thousands
    self = nullptr;
    Phase phase = read_phase(copy.barrier);
    if (phase.mark != MARK) {
        fault_at(nullptr, "%s: its barrier at %u was overwritten", copy.what,
                 copy.barrier.address);
    }
    bool early = copy.global == nullptr && phase.left > 0;  // a store may precede its announcement
    if (!early && phase.bytes < static_cast<int>(copy.bytes)) {
        fault_at(nullptr, "%s: %u bytes came, the barrier at %u expects %d more", copy.what,
                 copy.bytes, copy.barrier.address, int(phase.bytes));
    }
    phase.bytes -= copy.bytes;
    land(copy);
    return settle(copy.barrier, phase);
}

void prefetch(const void* from, u32 bytes) {
    SITE();
    if (bytes % 16 != 0 || reinterpret_cast<u64>(from) % 16 != 0) {
        fault("prefetch: bytes and source must be multiples of 16 (got %u, %p)", bytes, from);
    }
    check_global(from, bytes, false, "prefetch");
    count_prefetch(from, bytes);
}

void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
    SITE();
    if (bytes == 0 || bytes % 16 != 0 || reinterpret_cast<u64>(from) % 16 != 0) {
        fault("copy_bulk: bytes and source must be multiples of 16 (got %u, %p)", bytes, from);
    }
    check_shared(to, bytes, 16, "copy_bulk");
    check_global(from, bytes, false, "copy_bulk");
    phase_at(own(barrier), "copy_bulk");
    check_fenced(own(to), bytes);
    send("copy_bulk", own(to), bytes, own(barrier)).global = static_cast<const u8*>(from);
}

void store_cluster16(u32 remote, const void* value, u32 remote_barrier) {
    SITE();
    Spot to = check_remote(remote, 16, 16, "store_cluster16");
    Spot barrier = barrier_of(remote_barrier, "store_cluster16");
    if (to.rank != barrier.rank) fault("store_cluster16: its barrier must be in the same block");
    memcpy(send("store_cluster16", to, 16, barrier).held, value, 16);
}

// ---- copies by groups ----------------------------------------------------------------------------
void copy_async16(u32 to, const void* from, bool valid) {
    SITE();
    check_shared(to, 16, 16, "copy_async16");
    if (valid) {
        if (reinterpret_cast<u64>(from) % 16 != 0) {
            fault("copy_async16: source must be a multiple of 16 (got %p)", from);
        }
        check_global(from, 16, false, "copy_async16");
        if (self->let_early && last_range->flags & READ_EARLY) {
            fault("copy_async16: from memory that is read early, after let_next_start");
        }
    }
    check_overwritten(own(to), 16, "copy_async16");
    memset(at(to), POISON, 16);
    self->pieces.push_back({to, static_cast<const u8*>(from), valid, self->committed});
}

// A copy that nobody waits for could land in what is stored there later.
void check_copies_of(const Thread& thread) {
    if (!thread.pieces.empty()) fault("copy_async16: the thread ended without waiting for it");
}

void received(u32 x) {
    races.received(self->number);
    emulated_received = (emulated_received + x) * 0x9e3779b97f4a7c15ull + 1;
}

void copy_async_commit() { self->committed++; }

void copy_async_wait(int left) {
    SITE();
    std::vector<Piece>& pieces = self->pieces;
    size_t n = 0;
    // Groups 0 .. committed - 1 are committed; the last `left` of them may stay in flight.
    while (n < pieces.size() && static_cast<int>(pieces[n].group) <
           static_cast<int>(self->committed) - left) {
        check_race(own(pieces[n].to), 16, true, "copy_async16");
        land(pieces[n++]);
    }
    pieces.erase(pieces.begin(), pieces.begin() + static_cast<long>(n));
}

// ---- transaction barriers --------------------------------------------------------------------------
void barrier_init(u32 barrier, int count) {
    SITE();
    check_shared(barrier, 8, 8, "barrier_init");
    if (count < 1 || count > MOST_THREADS) {
        fault("barrier_init: count must be 1 to %d (got %d)", MOST_THREADS, count);
    }
    check_race(own(barrier), 8, true, "barrier_init");
    Phase phase = {0, static_cast<u64>(count), static_cast<u64>(count), MARK, 0};
    memcpy(at(barrier), &phase, 8);
    races.unpublish(self->number, barrier);
    self->inits.push_back(barrier);
}

void barrier_init_done() {
    races.publish(self->number, self->inits);
    self->inits.clear();
}

void barrier_expect(u32 barrier, u32 bytes) {
    SITE();
    arrive_at(own(barrier), bytes, "barrier_expect");
}

// Without a missing arrival, the phase that the bytes are for may have ended.
void barrier_announce(u32 barrier, u32 bytes) {
    SITE();
    Phase phase = phase_at(own(barrier), "barrier_announce");
    note(own(barrier));
    if (phase.left == 0) fault("barrier_announce: all of the barrier's %d have arrived", int(phase.count));
    announce(phase, bytes, "barrier_announce");
    memcpy(at(own(barrier)), &phase, 8);
}

void barrier_arrive(u32 barrier) {
    SITE();
    arrive_at(own(barrier), 0, "barrier_arrive");
}

void barrier_arrive_cluster(u32 remote_barrier) {
    SITE();
    arrive_at(barrier_of(remote_barrier, "barrier_arrive_cluster"), 0, "barrier_arrive_cluster");
}

void barrier_wait(u32 barrier, u32 parity) {
    SITE();
    wait_at(barrier, parity, false, "barrier_wait");
}

void barrier_wait_cluster(u32 barrier, u32 parity) {
    SITE();
    wait_at(barrier, parity, true, "barrier_wait_cluster");
}

}  // namespace emulator
