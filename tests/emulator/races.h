// Races on shared memory, by vector clocks (Flanagan and Freund, FastTrack, 2009): two threads touch a
// byte, one of them writes, and no barrier orders them. Of several readers only the last is kept, so
// a race may stay unseen, but what is told is one. Shuffles and matrix products order nothing.
#pragma once

#include <string.h>

#include <map>
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
            if (write && cell.read > now[cell.reader]) {
                found = {cell.reader, cell.read_site, false};
            }
            if (write) {
                cell = {now[thread], 0, static_cast<u32>(site), 0, u16(thread), 0};
            } else {
                cell.read = now[thread], cell.reader = u16(thread);
                cell.read_site = static_cast<u32>(site);
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
            cells[i] = {of(engine)[engine], 0, static_cast<u32>(site), 0, u16(engine), 0};
        }
        arrive(engine, barrier);
    }

private:
    typedef unsigned short u16;
    struct Cell {
        u32 wrote, read, write_site, read_site;
        u16 writer, reader;
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

}  // namespace emulator
