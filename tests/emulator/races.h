// Races on shared memory, by vector clocks (Flanagan and Freund, FastTrack, 2009): two threads touch a
// byte, one of them writes, and no barrier orders them. Of many readers two are kept, so a race may
// stay unseen, but what is told is one. Shuffles and matrix products order nothing.
//
// Threads are numbered through the cluster. After them come, for each block, the engine that makes
// its copies and one that stands for its beginning: who has seen that one may touch its memory.
#pragma once

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

    // `blocks` of `threads` each, with so many bytes of shared memory.
    // A large cluster's records are some 200 MB, and every emulated kernel has its own.
    void forget() {
        std::vector<Cell>().swap(cells);
        std::vector<u32>().swap(clocks);
    }

    void start(int threads, int blocks, u64 bytes) {
        each = threads, all = threads * blocks, count = all + 2 * blocks, span = bytes;
        clocks.assign(static_cast<size_t>(all) * static_cast<size_t>(count), 0);
        for (int t = 0; t < all; t++) of(t)[t] = of(t)[beginning(t / each)] = 1;
        cells.assign(bytes * static_cast<u64>(blocks), Cell{});
        engines.assign(static_cast<size_t>(blocks), 1);
        beginnings.assign(static_cast<size_t>(blocks), 1);
        barriers.clear(), published.clear(), fences.clear(), fenced.clear(), counters.clear();
        meeting.assign(static_cast<size_t>(count), 0);
        met = meeting;
    }

    // Whom an access races with; thread -1: nobody.
    Place access(int thread, int rank, u32 address, u64 bytes, bool write, u64 site) {
        const u32* now = of(thread);
        Place found = NONE;
        Cell* cell = cell_of(rank, address);
        for (u64 i = 0; i < bytes; i++, cell++) {
            u32 where = address + static_cast<u32>(i);
            if (cell->wrote > now[cell->writer]) {
                found = {cell->writer, cell->write_site, true, where};
            }
            for (const Read& read : cell->reads) {
                if (write && read.clock > now[read.thread]) {
                    found = {read.thread, read.site, false, where};
                }
            }
            if (write) {
                *cell = {now[thread], static_cast<u32>(site), u16(thread), {}};
                continue;
            }
            Read* reads = cell->reads;
            // What comes from outside of the block is kept until it is known to be over.
            bool kept = foreign(reads[1].thread, rank) && reads[1].clock > now[reads[1].thread];
            if (!kept && reads[0].thread / 32 != thread / 32) reads[1] = reads[0];
            reads[0] = {now[thread], static_cast<u32>(site), u16(thread)};
        }
        return found;
    }

    // All of these meet.
    template <class Threads> void meet(const Threads& these) {
        std::vector<u32> sum(static_cast<size_t>(count), 0);
        for (int t : these) join(sum.data(), of(t));
        for (int t : these) {
            memcpy(of(t), sum.data(), sum.size() * sizeof(u32));
            of(t)[t]++;
        }
    }

    // ---- transaction barriers -------------------------------------------------------------------
    // `rank` is the barrier's block. What comes from other blocks is for waits of the cluster.
    void arrive(int thread, int rank, u32 barrier) {
        join(left_at(rank, barrier, thread / each != rank), of(thread));
        tick(thread);
    }
    void wait(int thread, int rank, u32 barrier, bool cluster) {
        for (int far = 0; far <= static_cast<int>(cluster); far++) {
            join(of(thread), left_at(rank, barrier, far));
        }
    }
    // By barrier_init_done: who meets this thread, however loosely, may use the barrier.
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
    // The number of a copy that block `rank` now sends.
    u32 send(int rank) { return engines[static_cast<size_t>(rank)]++; }
    // Copy `clock` of block `from` reads this, until it has landed.
    void read_by_copy(int from, u32 clock, int rank, u32 address, u64 bytes, u64 site) {
        Cell* cell = cell_of(rank, address);
        for (u64 i = 0; i < bytes; i++, cell++) {
            cell->reads[1] = {clock, static_cast<u32>(site), u16(engine(from))};
        }
    }
    // Who wrote what this thread has not seen; notes no access.
    Place unseen(int thread, int rank, u32 address, u64 bytes) {
        const Cell* cell = cell_of(rank, address);
        for (u64 i = 0; i < bytes; i++, cell++) {
            if (cell->wrote <= of(thread)[cell->writer]) continue;
            return {cell->writer, cell->write_site, true, address + static_cast<u32>(i)};
        }
        return NONE;
    }
    // Copy `clock` of block `from` is there: who waits for the barrier may read it.
    void land(int from, u32 clock, int rank, u32 address, u64 bytes, u32 barrier, u64 site) {
        Cell* cell = cell_of(rank, address);
        for (u64 i = 0; i < bytes; i++, cell++) {
            *cell = {clock, static_cast<u32>(site), u16(engine(from)), {}};
        }
        u32& seen = left_at(rank, barrier, from != rank)[engine(from)];
        seen = std::max(seen, clock);
    }
    void fence(int thread) {
        fences[thread].push_back(of(thread)[thread]);
        fenced[thread].assign(of(thread), of(thread) + count);
        tick(thread);
    }
    // Who wrote what a copy by this thread is to read, with no fence by either in between.
    Place unfenced(int thread, u32 address, u64 bytes) {
        const u32* now = of(thread);
        const std::vector<u32>& mine = fenced[thread];
        const Cell* cell = cell_of(thread / each, address);
        for (u64 i = 0; i < bytes; i++, cell++) {
            if (cell->wrote == 0 || cell->writer >= all) continue;
            if (!mine.empty() && cell->wrote <= mine[cell->writer]) continue;
            const std::vector<u32>& theirs = fences[cell->writer];
            auto after = std::lower_bound(theirs.begin(), theirs.end(), cell->wrote);
            if (after != theirs.end() && *after < now[cell->writer]) continue;
            return {cell->writer, cell->write_site, true, address + static_cast<u32>(i)};
        }
        return NONE;
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
        std::fill(meeting.begin(), meeting.end(), 0);
    }
    void wait_cluster(int thread) { join(of(thread), met.data()); }
    // An arrival at a counter in device memory, after those that were there before.
    void count_at(int thread, u64 counter) {
        std::vector<u32>& there = counters[counter];
        there.resize(static_cast<size_t>(count), 0);
        join(of(thread), there.data());
        join(there.data(), of(thread));
        tick(thread);
    }
    bool has_begun(int thread, int rank) { return of(thread)[beginning(rank)] != 0; }
    // What others do to the memory of a block that ends and none of its threads knows to be over.
    Place left_open(int rank, u32 first, u32 last) {
        std::vector<u32> end(static_cast<size_t>(count), 0);
        for (int t = rank * each; t < (rank + 1) * each; t++) join(end.data(), of(t));
        const Cell* cell = cell_of(rank, first);
        for (u32 i = first; i < last; i++, cell++) {
            for (const Read& read : cell->reads) {
                if (foreign(read.thread, rank) && read.clock > end[read.thread]) {
                    return {read.thread, read.site, false, i};
                }
            }
            if (foreign(cell->writer, rank) && cell->wrote > end[cell->writer]) {
                return {cell->writer, cell->write_site, true, i};
            }
        }
        return NONE;
    }

    // What thread knows of another: the clock up to which it has seen it.
    const u32* seen_by(int thread) { return of(thread); }
    void tick(int thread) { of(thread)[thread]++; }
    int size() const { return count; }
    int threads() const { return all; }

private:
    typedef unsigned short u16;
    struct Read {
        u32 clock, site;
        u16 thread;
    };
    struct Cell {
        u32 wrote, write_site;
        u16 writer;
        Read reads[2];  // the last, and the last of another warp
    };

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
    Cell* cell_of(int rank, u32 address) {
        return cells.data() + static_cast<u64>(rank) * span + address;
    }
    u64 key(int rank, u32 barrier) const { return static_cast<u64>(rank) * span + barrier; }
    u32* left_at(int rank, u32 barrier, bool far) {
        std::vector<u32>& there = barriers[2 * key(rank, barrier) + far];
        there.resize(static_cast<size_t>(count), 0);
        return there.data();
    }

    int each = 0, all = 0, count = 0;
    u64 span = 0;
    std::vector<u32> clocks, engines, beginnings, meeting, met;
    std::vector<Cell> cells;
    std::map<u64, std::vector<u32>> barriers, counters;
    std::map<u64, u32> published;
    std::map<int, std::vector<u32>> fences, fenced;
};

// The same for reads of device memory that this launch has written. A cluster hands over to another
// by `arrive`: what the arriving thread has seen by then is let go, and who has seen an `arrive` of
// its own cluster may read what others let go. Most clusters are one block.
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

    void write(Races& races, int thread, u64 address, u64 bytes, u64 site) {
        u32 clock = races.seen_by(thread)[thread];
        for (u64 i = address; i < address + bytes; i++) {
            Page*& page = page_of(i);
            if (page == nullptr) page = (owned.emplace_back(new Page()), owned.back().get());
            page->cells[i % PAGE_BYTES] = {cluster, clock, thread, static_cast<u32>(site)};
        }
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
