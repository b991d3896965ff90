// How the positions that a row sees are cut into pieces, which thread blocks process in parallel.
// The cut depends on the row's absolute position only, so that its sums are grouped in the same way
// wherever its block begins.
//
// A row has at most PIECES pieces. All have the same whole number of units, except for the last. On
// the largest device (132 multiprocessors) each of four heads has PIECES multiprocessors, so that
// one wave of blocks takes all pieces. The units per piece grow by one every PIECES * UNIT
// positions. A block of rows that crosses such a border processes the pieces of both lengths, and
// each row uses its own.
//
// If there are thread blocks enough, two share a piece, each with half of the heads. Which block has
// which sums to make does not change a bit of them.
#pragma once

#include "cuda/device.cuh"

constexpr int PIECES = 33;
constexpr int UNIT = 128;  // positions

// Positions of each piece of the row at `position`.
DEVICE int piece_of(int position) { return UNIT * (position / (PIECES * UNIT) + 1); }

// The first slot for results of pieces of this length; the two lengths that a block of rows may
// need have separate slots.
DEVICE int slots_of(int piece) { return (piece / UNIT - 1) % 2 * PIECES; }

// One piece: positions start .. stop - 1, and where its result goes.
struct Span {
    int start, stop, slot;
};

// Which half of a group's heads, or both.
struct Heads {
    int first, count;  // halves
};
constexpr Heads BOTH = {0, 2};

// The pieces of one block of rows, and those of them that a thread block takes: from `item` on every
// `stride`th; none if `item` is negative. Those of the rows before a border come first.
struct Pieces {
    int before, after;  // positions per piece for the first row and for the last
    int end;            // end of the positions that any row sees
    int count;
    int item, stride;
    Heads heads;        // of the thread block

    DEVICE int across() const { return before == after ? 0 : PIECES; }
    DEVICE Span span(int item) const {
        const bool early = item < across();
        const int piece = early ? before : after, index = early ? item : item - across();
        return {index * piece, early ? (index + 1) * piece : min((index + 1) * piece, end),
                slots_of(piece) + index};
    }
};

// The pieces of the rows at positions first .. end - 1, for a thread block out of `blocks`. Block 0
// starts first and has the last piece, whose block has the most to prepare: the call's own rows.
DEVICE Pieces divided(int first, int end, int block, int blocks) {
    Pieces to = {piece_of(first), piece_of(end - 1), end, 0, 0, blocks, BOTH};
    to.count = to.across() + (end - 1) / to.after + 1;
    const int last = to.count - 1;
    if (2 * last + 1 > blocks) {
        to.item = (last - block) % blocks;
        return to;
    }
    // One block may be missing; then the last piece, often a short one, has a single block.
    const bool single = 2 * last + 1 == blocks;
    const int half = block + single;
    to.item = last - half / 2;
    if (!single || block > 0) to.heads = {half % 2, 1};
    return to;
}

// All positions in one piece.
DEVICE Pieces undivided(int end) { return {end, end, end, 1, 0, 1, BOTH}; }

// Iterates over the tiles of a thread block's pieces, tile by tile and piece by piece.
template <int POSITIONS> struct KvTileIterator {
    int item, first, stop;  // the piece; first position of the tile; end of the piece

    DEVICE KvTileIterator(const Pieces& of) : item(of.item) { enter(of); }
    DEVICE void enter(const Pieces& of) {
        const Span span = of.span(item);
        first = span.start;
        stop = span.stop;
    }
    DEVICE bool valid(const Pieces& of) const { return item < of.count; }
    DEVICE bool ends() const { return first + POSITIONS >= stop; }
    DEVICE void step(const Pieces& of) {
        if (!ends()) {
            first += POSITIONS;
            return;
        }
        item += of.stride;
        enter(of);
    }
};
