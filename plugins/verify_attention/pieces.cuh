// How what a row sees is cut into pieces that blocks walk in parallel: by the row's own absolute
// position alone, so that its sums are grouped alike wherever its block began.
//
// A row has at most PIECES pieces, of equal whole units but for the last: as many as one head of
// four has multiprocessors on the largest machine, so that one turn of the grid takes them all. The
// unit count grows every PIECES * UNIT positions; a block of rows that lies across such a border
// walks the pieces of both sides, and each row takes its own.
#pragma once

#include "cuda/device.cuh"

constexpr int PIECES = 33;
constexpr int UNIT = 128;  // positions

// Positions of each piece of the row at `position`.
DEVICE int piece_of(int position) { return UNIT * (position / (PIECES * UNIT) + 1); }

// Where the results of pieces that long begin: the two lengths a block may need alternate.
DEVICE int slots_of(int piece) { return (piece / UNIT - 1) % 2 * PIECES; }

// One piece: positions start .. stop - 1, and where its result goes.
struct Span {
    int start, stop, slot;
};

// The pieces of one block of rows, walked `stride` apart. Those of the rows before a border come
// first.
struct Pieces {
    int before, after;  // positions of a piece of the first row and of the last
    int end;            // of what any row sees
    int stride;
    int count;

    DEVICE int across() const { return before == after ? 0 : PIECES; }
    DEVICE Span span(int item) const {
        const bool early = item < across();
        const int piece = early ? before : after, index = early ? item : item - across();
        return {index * piece, early ? (index + 1) * piece : min((index + 1) * piece, end),
                slots_of(piece) + index};
    }
};

// Those of rows at `first` .. end - 1, whichever sees most.
DEVICE Pieces divided(int first, int end, int stride) {
    Pieces to = {piece_of(first), piece_of(end - 1), end, stride, 0};
    to.count = to.across() + (end - 1) / to.after + 1;
    return to;
}

// Everything in one piece.
DEVICE Pieces undivided(int end) { return {end, end, end, 1, 1}; }

// A walk over the tiles of a block's pieces: a tile at a time, across from piece to piece.
template <int POSITIONS> struct Walk {
    int item, first, stop;  // first: of the tile

    DEVICE Walk(const Pieces& of) : item(blockIdx.x) { enter(of); }
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
