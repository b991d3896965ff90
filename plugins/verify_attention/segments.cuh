// How positions are cut into pieces that blocks walk in parallel, by absolute position alone, so
// that a row's sums are grouped alike wherever its block began and however long the cache is.
//
// Below 4096 a piece is 128 positions, above it a sixteenth of the power of two at or below its
// start: 32 pieces at 4k, 16 more for each doubling, the longest never above 1/16 of the context.
// Sixteen times the key/value heads of equal longest pieces keep every multiprocessor busy at any
// context, and the partial results stay small against the cache.
#pragma once

#include "cuda/device.cuh"

constexpr int SHORT_LOG = 7;
constexpr int LONG_FROM_LOG = 12;
constexpr int SHORT_PIECES = 1 << (LONG_FROM_LOG - SHORT_LOG);

DEVICE int segment_of(int position) {
    if (position < (1 << LONG_FROM_LOG)) return position >> SHORT_LOG;
    const int octave = 31 - __clz(position);
    return SHORT_PIECES + 16 * (octave - LONG_FROM_LOG) + ((position >> (octave - 4)) & 15);
}

DEVICE int segment_start(int segment) {
    if (segment < SHORT_PIECES) return segment << SHORT_LOG;
    const int octave = (segment - SHORT_PIECES) >> 4;
    return (16 + ((segment - SHORT_PIECES) & 15)) << (octave + LONG_FROM_LOG - 4);
}
