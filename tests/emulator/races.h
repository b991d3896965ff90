// Races on shared memory, by vector clocks (Flanagan and Freund, FastTrack, 2009): two threads touch a
// byte, one of them writes, and no barrier orders them. Of many readers two are kept, so a race may
// stay unseen, but what is told is one. Shuffles and matrix products order nothing.
#pragma once

#include <string.h>

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
    };

    // `most` threads and, as one more, the engine of bulk copies.
    void start(int most, u64 bytes) {
        count = most + 1;
        clocks.assign(static_cast<size_t>(count) * static_cast<size_t>(count), 0);
        for (int t = 0; t < count; t++) of(t)[t] = 1;
        cells.assign(bytes, Cell{});
        barriers.clear();
    }

    // Whom an access races with; thread -1: nobody.
    Place access(int thread, u64 address, u64 bytes, bool write, u64 site) {
        const u32* now = of(thread);
        Place found = {-1, 0, false};
        for (u64 i = address; i < address + bytes; i++) {
            Cell& cell = cells[i];
            if (cell.wrote > now[cell.writer]) found = {cell.writer, cell.write_site, true};
            for (const Read& read : cell.reads) {
                if (write && read.clock > now[read.thread]) {
                    found = {read.thread, read.site, false};
                }
            }
            if (write) {
                cell = {now[thread], static_cast<u32>(site), u16(thread), {}};
            } else {
                if (cell.reads[0].thread / 32 != thread / 32) cell.reads[1] = cell.reads[0];
                cell.reads[0] = {now[thread], static_cast<u32>(site), u16(thread)};
            }
        }
        return found;
    }

    // All of these meet.
    template <class Threads> void meet(const Threads& these) {
        std::vector<u32> all(static_cast<size_t>(count), 0);
        for (int t : these) join(all.data(), of(t));
        for (int t : these) {
            memcpy(of(t), all.data(), all.size() * sizeof(u32));
            of(t)[t]++;
        }
    }

    void arrive(int thread, u32 barrier) {
        std::vector<u32>& there = barriers[barrier];
        there.resize(static_cast<size_t>(count), 0);
        join(there.data(), of(thread));
        of(thread)[thread]++;
    }

    void wait(int thread, u32 barrier) {
        std::vector<u32>& there = barriers[barrier];
        if (!there.empty()) join(of(thread), there.data());
    }

    // A bulk copy has landed: who waits for the barrier may read it.
    void land(u64 address, u64 bytes, u32 barrier, u64 site) {
        int engine = count - 1;
        for (u64 i = address; i < address + bytes; i++) {
            cells[i] = {of(engine)[engine], static_cast<u32>(site), u16(engine), {}};
        }
        arrive(engine, barrier);
    }

    // What thread knows of another: the clock up to which it has seen it.
    const u32* seen_by(int thread) { return of(thread); }
    void tick(int thread) { of(thread)[thread]++; }
    int size() const { return count; }

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

    int count = 0;
    std::vector<u32> clocks;
    std::vector<Cell> cells;
    std::map<u32, std::vector<u32>> barriers;
};

// The same for reads of device memory that this launch has written. A block hands over to another by
// `arrive`: what the arriving thread has seen by then is let go, and who has seen an `arrive` of its
// own block may read what others let go.
class Global {
public:
    void start_launch() {
        pages.clear();
        owned.clear();
        let_go.assign(1, {});
        last = nullptr;
    }
    void start_block() {
        block = static_cast<u32>(let_go.size());
        let_go.emplace_back();
        arrivals.clear();
    }

    void arrive(Races& races, int thread) {
        const u32* now = races.seen_by(thread);
        std::vector<u32>& gone = let_go[block];
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
            page->cells[i % PAGE_BYTES] = {block, clock, thread, static_cast<u32>(site)};
        }
    }

    Races::Place read(Races& races, int thread, u64 address, u64 bytes) {
        const u32* now = races.seen_by(thread);
        for (u64 i = address; i < address + bytes; i++) {
            const Page* page = page_of(i);
            if (page == nullptr) continue;
            const Cell& cell = page->cells[i % PAGE_BYTES];
            if (cell.block == 0 || ordered(cell, now)) continue;
            return {cell.thread, cell.site, true};
        }
        return {-1, 0, false};
    }

private:
    static constexpr u64 PAGE_BYTES = 1024;
    struct Cell {
        u32 block, clock;
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
        if (cell.block == block) return cell.clock <= now[cell.thread];
        const std::vector<u32>& gone = let_go[cell.block];
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

    u32 block = 0;
    u64 last_number = 0;
    Page** last = nullptr;
    std::unordered_map<u64, Page*> pages;
    std::vector<std::unique_ptr<Page>> owned;
    std::vector<std::vector<u32>> let_go;
    std::vector<Arrival> arrivals;
};

}  // namespace emulator
