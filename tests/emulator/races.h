// Detects data races on shared memory by vector clocks (Flanagan and Freund, FastTrack, 2009): two
// threads access a byte, at least one of them writes, and no synchronisation orders the accesses. At
// most two readers of a byte are remembered, so a race may be missed, but every reported one is real.
// Shuffles and matrix products order nothing. A load may still be going on after a barrier unless its
// thread has called `received`.
//
// Threads are numbered through the cluster. After them, each block has two more clocks: one for its
// copy engine, and one for its beginning. A thread that has seen the latter knows that the block has
// started, so it may access its memory.
#pragma once

#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

namespace emulator {

class Races {
public:
    struct Place {
        int thread;
        u64 site;
        bool wrote;
        u32 address;
    };
    static constexpr Place NONE = {-1, 0, false, 0};

    // Frees the records: every emulated kernel has its own, some 30 MB after a large cluster.
    void forget() {
        words.reset(), cells.reset();
        std::vector<u32>().swap(clocks);
    }

    // Begins a launch with clusters of `blocks` blocks of `threads` threads. Valid addresses of shared
    // memory are those below `hole` and those from `after` to `bytes`.
    void start_launch(int threads, int blocks, u32 hole, u32 after, u64 bytes) {
        each = threads, all = threads * blocks, count = all + 2 * blocks;
        hole_begin = (hole + 3) / 4 * 4, hole_bytes = after - hole_begin;
        span = (bytes - hole_bytes + 3) / 4 * 4;
        words.reset(make_cells(span * static_cast<u64>(blocks) / 4));
        cells.reset(make_cells(span * static_cast<u64>(blocks)));
        origin = 0;
        engines.assign(static_cast<size_t>(blocks), 0);
        beginnings = engines;
        clocks.assign(static_cast<size_t>(all) * static_cast<size_t>(count), 0);
    }

    // Begins a cluster. Clocks continue where those of the previous cluster ended, so all its records
    // lie in the past and need not be cleared. A clock value of `origin` has seen nothing of this one.
    void start_cluster() {
        for (int t = 0; t < all; t++) origin = std::max(origin, of(t)[t]);
        for (u32 clock : engines) origin = std::max(origin, clock);
        for (u32 clock : beginnings) origin = std::max(origin, clock);
        std::fill(clocks.begin(), clocks.end(), origin);
        for (int t = 0; t < all; t++) of(t)[t] = of(t)[beginning(t / each)] = origin + 1;
        std::fill(engines.begin(), engines.end(), origin + 1);
        got.assign(static_cast<size_t>(all), origin);
        std::fill(beginnings.begin(), beginnings.end(), origin + 1);
        barriers.clear(), ended.clear(), published.clear(), counters.clear();
        meeting.assign(static_cast<size_t>(count), origin);
        met = meeting;
    }

    // Notes an access. Returns an earlier access that it races with; thread -1 if there is none.
    Place access(int thread, int rank, u32 address, u64 bytes, bool write, u64 site) {
        const u32* now = of(thread);
        Place found = NONE;
        visit(rank, address, bytes, [&](Cell& cell, u32 at) {
            Place other = race(cell, now, write, at);
            if (other.thread >= 0) found = other;
            if (write) cell = Cell{now[thread], static_cast<u32>(site), u16(thread)};
            else note_read(cell, rank, now, thread, static_cast<u32>(site));
        });
        return found;
    }

    // A barrier: each of these threads sees everything that the others did before.
    template <class Threads> void meet(const Threads& these) {
        std::vector<u32> sum(static_cast<size_t>(count), 0);
        for (int t : these) join(sum.data(), of(t));
        for (int t : these) {
            memcpy(of(t), sum.data(), sum.size() * sizeof(u32));
            of(t)[t]++;
        }
    }

    // ---- transaction barriers -------------------------------------------------------------------
    // `rank` is the barrier's block. Arrivals and copies from other blocks are seen only by waits
    // with `cluster` set.
    void arrive(int thread, int rank, u32 barrier) {
        join(left_at(rank, barrier, thread / each != rank), of(thread));
        tick(thread);
    }
    // A phase ends: threads that wait for it see what has arrived by now, and nothing later.
    void end_phase(int rank, u32 barrier) {
        for (u64 far = 0; far <= 1; far++) {
            auto there = barriers.find(2 * key(rank, barrier) + far);
            if (there != barriers.end()) ended[there->first] = there->second;
        }
    }
    void wait(int thread, int rank, u32 barrier, bool cluster) {
        for (u64 far = 0; far <= static_cast<u64>(cluster); far++) {
            auto found = ended.find(2 * key(rank, barrier) + far);
            if (found != ended.end()) join(of(thread), found->second.data());
        }
    }
    // barrier_init_done: a thread that synchronises with this one, even by a relaxed arrival, may use
    // these barriers.
    void publish(int thread, const std::vector<u32>& made) {
        int rank = thread / each;
        u32 clock = ++beginnings[static_cast<size_t>(rank)];
        for (u32 barrier : made) published[key(rank, barrier)] = clock;
        of(thread)[beginning(rank)] = clock;
    }
    void unpublish(int thread, u32 barrier) { published.erase(key(thread / each, barrier)); }
    bool is_published(int rank, u32 barrier) { return published.count(key(rank, barrier)) != 0; }
    bool knows(int thread, int rank, u32 barrier) {
        auto found = published.find(key(rank, barrier));
        return found != published.end() && found->second <= of(thread)[beginning(rank)];
    }

    // ---- copies ---------------------------------------------------------------------------------
    // Returns the number of a copy that block `rank` now begins.
    u32 send(int rank) { return engines[static_cast<size_t>(rank)]++; }
    // Notes that copy `clock` of block `from` uses this memory, its barrier, until it has landed.
    void read_by_copy(int from, u32 clock, int rank, u32 address, u64 bytes, u64 site) {
        visit(rank, address, bytes, [&](Cell& cell, u32) {
            cell.reads[1] = {clock, static_cast<u32>(site), u32(engine(from))};
        });
    }
    // Returns a write that this thread has not seen. Notes no access.
    Place unseen(int thread, int rank, u32 address, u64 bytes) {
        const u32* now = of(thread);
        Place found = NONE;
        visit(rank, address, bytes, [&](const Cell& cell, u32 at) {
            if (cell.wrote > now[cell.writer]) found = {cell.writer, cell.write_site, true, at};
        });
        return found;
    }
    // Copy `clock` of block `from` has landed: threads that wait for the barrier may read it.
    void land(int from, u32 clock, int rank, u32 address, u64 bytes, u32 barrier, u64 site) {
        visit(rank, address, bytes, [&](Cell& cell, u32) {
            cell = Cell{clock, static_cast<u32>(site), u16(engine(from))};
        });
        u32& seen = left_at(rank, barrier, from != rank)[engine(from)];
        seen = std::max(seen, clock);
    }
    // All earlier loads of this thread are complete.
    void received(int thread) {
        got[static_cast<size_t>(thread)] = of(thread)[thread];
        tick(thread);
    }
    // Returns a load of this memory that may not be complete: its thread has not called `received`.
    Place unreceived(int rank, u32 address, u64 bytes) {
        Place found = NONE;
        visit(rank, address, bytes, [&](const Cell& cell, u32 at) {
            for (const Read& read : cell.reads) {
                if (read.clock <= origin || read.thread >= u32(all)) continue;
                if (read.clock > got[read.thread]) found = {int(read.thread), read.site, false, at};
            }
        });
        return found;
    }

    // ---- the cluster ----------------------------------------------------------------------------
    void arrive_cluster(int thread, bool relaxed) {
        if (!relaxed) {
            join(meeting.data(), of(thread));
            return tick(thread);
        }
        u32& begun = meeting[static_cast<size_t>(beginning(thread / each))];
        begun = std::max(begun, of(thread)[beginning(thread / each)]);
    }
    void open_cluster() {
        met.swap(meeting);
        std::fill(meeting.begin(), meeting.end(), origin);
    }
    void wait_cluster(int thread) { join(of(thread), met.data()); }
    // An arrival at a counter in device memory sees all earlier arrivals there.
    void count_at(int thread, u64 counter) {
        std::vector<u32>& there = counters[counter];
        there.resize(static_cast<size_t>(count), 0);
        join(of(thread), there.data());
        join(there.data(), of(thread));
        tick(thread);
    }
    bool has_begun(int thread, int rank) { return of(thread)[beginning(rank)] > origin; }
    // When a block ends: returns an access of another block to its memory that none of its threads
    // knows to be complete.
    Place left_open(int rank, u32 first, u32 last) {
        std::vector<u32> end(static_cast<size_t>(count), 0);
        for (int t = rank * each; t < (rank + 1) * each; t++) join(end.data(), of(t));
        Place found = NONE;
        visit(rank, first, last - first, [&](const Cell& cell, u32 at) {
            if (cell.wrote > end[cell.writer] && foreign(cell.writer, rank)) {
                found = {cell.writer, cell.write_site, true, at};
            }
            for (const Read& read : cell.reads) {
                if (read.clock > end[read.thread] && foreign(int(read.thread), rank)) {
                    found = {int(read.thread), read.site, false, at};
                }
            }
        });
        return found;
    }

    // A thread's vector clock: for each other thread, the clock up to which it has seen it.
    const u32* seen_by(int thread) { return of(thread); }
    void tick(int thread) { of(thread)[thread]++; }
    int size() const { return count; }
    int threads() const { return all; }

private:
    typedef unsigned short u16;
    struct Read {
        u32 clock, site;
        u32 thread;
    };
    struct Cell {
        u32 wrote, write_site;
        u16 writer, split;  // split: the word's bytes have records of their own
        Read reads[2];      // the last one, and the last one by another warp, block or copy engine
    };

    static Place race(const Cell& cell, const u32* now, bool write, u32 at) {
        for (int i = 1; write && i >= 0; i--) {
            const Read& read = cell.reads[i];
            if (read.clock > now[read.thread]) return {int(read.thread), read.site, false, at};
        }
        if (cell.wrote > now[cell.writer]) return {cell.writer, cell.write_site, true, at};
        return NONE;
    }
    void note_read(Cell& cell, int rank, const u32* now, int thread, u32 site) {
        Read* reads = cell.reads;
        // A read from outside the block is kept until this thread knows that it is complete.
        bool kept = reads[1].clock > now[reads[1].thread] && foreign(int(reads[1].thread), rank);
        if (!kept && reads[0].thread / 32 != u32(thread) / 32) reads[1] = reads[0];
        reads[0] = {now[thread], site, u32(thread)};
    }

    u32* of(int thread) {
        return clocks.data() + static_cast<size_t>(thread) * static_cast<size_t>(count);
    }
    void join(u32* to, const u32* from) {
        for (int i = 0; i < count; i++) to[i] = to[i] < from[i] ? from[i] : to[i];
    }
    int engine(int rank) const { return all + 2 * rank; }
    int beginning(int rank) const { return all + 2 * rank + 1; }
    bool foreign(int thread, int rank) const {
        return thread < rank * each || thread >= (rank + 1) * each;
    }
    // Calls see(cell, address) for every record of these bytes. A word of four bytes has one record
    // until some of its bytes are accessed without the others.
    template <class See> void visit(int rank, u32 address, u64 bytes, See see) {
        u64 place = static_cast<u64>(rank) * span +
                    (address < hole_begin ? address : address - hole_bytes);
        for (u64 next, end = place + bytes; place < end; address += u32(next - place), place = next) {
            Cell& word = words[place / 4];
            Cell* four = cells.get() + place / 4 * 4;
            next = std::min(end, (place / 4 + 1) * 4);
            bool whole = next - place == 4;
            if (whole && !word.split) {
                see(word, address);
                continue;
            }
            if (!word.split) std::fill(four, four + 4, word), word.split = 1;
            for (u64 i = place; i < next; i++) see(cells[i], address + u32(i - place));
            // Equal again: one record will do. A cell has no padding, and `split` is 0 in these four.
            if (whole && memcmp(four, four + 1, 3 * sizeof *four) == 0) word = *four;
        }
    }
    static u64 key(int rank, u32 barrier) { return static_cast<u64>(rank) << 32 | barrier; }
    u32* left_at(int rank, u32 barrier, bool far) {
        std::vector<u32>& there = barriers[2 * key(rank, barrier) + far];
        there.resize(static_cast<size_t>(count), 0);
        return there.data();
    }

    // By calloc, since pages that are never accessed then take no memory.
    static Cell* make_cells(u64 n) { return static_cast<Cell*>(calloc(n, sizeof(Cell))); }
    struct Free {
        void operator()(void* p) const { free(p); }
    };

    int each = 0, all = 0, count = 0;
    u32 origin = 0, hole_begin = 0, hole_bytes = 0;
    u64 span = 0;
    std::vector<u32> clocks, engines, beginnings, meeting, met, got;
    std::unique_ptr<Cell[], Free> words, cells;
    std::map<u64, std::vector<u32>> barriers, ended, counters;
    std::map<u64, u32> published;
};

// Detects races on device memory: reads and writes of what this launch has written. Clusters
// synchronise only by `arrive`. It releases everything that the arriving thread has seen by then; a
// thread that has seen an `arrive` of its own cluster may access what other clusters have released.
// Most clusters are a single block.
class Global {
public:
    void start_launch() {
        pages.clear();
        owned.clear();
        let_go.assign(1, {});
        last = nullptr;
    }
    void start_cluster() {
        cluster = static_cast<u32>(let_go.size());
        let_go.emplace_back();
        arrivals.clear();
    }

    void arrive(Races& races, int thread) {
        const u32* now = races.seen_by(thread);
        std::vector<u32>& gone = let_go[cluster];
        gone.resize(static_cast<size_t>(races.size()), 0);
        for (size_t i = 0; i < gone.size(); i++) gone[i] = gone[i] < now[i] ? now[i] : gone[i];
        arrivals.push_back({thread, now[thread]});
        races.tick(thread);
    }

    Races::Place write(Races& races, int thread, u64 address, u64 bytes, u64 site) {
        const u32* now = races.seen_by(thread);
        Races::Place found = Races::NONE;
        for (u64 i = address; i < address + bytes; i++) {
            Page*& page = page_of(i);
            if (page == nullptr) page = (owned.emplace_back(new Page()), owned.back().get());
            Cell& cell = page->cells[i % PAGE_BYTES];
            if (cell.cluster != 0 && !ordered(cell, now)) found = {cell.thread, cell.site, true, 0};
            cell = {cluster, now[thread], thread, static_cast<u32>(site)};
        }
        return found;
    }

    Races::Place read(Races& races, int thread, u64 address, u64 bytes) {
        const u32* now = races.seen_by(thread);
        for (u64 i = address; i < address + bytes; i++) {
            const Page* page = page_of(i);
            if (page == nullptr) continue;
            const Cell& cell = page->cells[i % PAGE_BYTES];
            if (cell.cluster == 0 || ordered(cell, now)) continue;
            return {cell.thread, cell.site, true};
        }
        return {-1, 0, false};
    }

private:
    static constexpr u64 PAGE_BYTES = 1024;
    struct Cell {
        u32 cluster, clock;
        int thread;
        u32 site;
    };
    struct Page {
        Cell cells[PAGE_BYTES];
    };
    struct Arrival {
        int thread;
        u32 clock;
    };

    bool ordered(const Cell& cell, const u32* now) const {
        if (cell.cluster == cluster) return cell.clock <= now[cell.thread];
        const std::vector<u32>& gone = let_go[cell.cluster];
        if (gone.empty() || cell.clock > gone[static_cast<size_t>(cell.thread)]) return false;
        for (const Arrival& mine : arrivals) {
            if (mine.clock <= now[mine.thread]) return true;
        }
        return false;
    }

    Page*& page_of(u64 address) {
        u64 number = address / PAGE_BYTES;
        if (last == nullptr || number != last_number) last = &pages[number], last_number = number;
        return *last;
    }

    u32 cluster = 0;
    u64 last_number = 0;
    Page** last = nullptr;
    std::unordered_map<u64, Page*> pages;
    std::vector<std::unique_ptr<Page>> owned;
    std::vector<std::vector<u32>> let_go;
    std::vector<Arrival> arrivals;
};

}  // namespace emulator
