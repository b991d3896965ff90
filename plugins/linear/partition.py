"""How the work of a product with few rows is cut: columns between clusters, K between the blocks of
one.

A cluster makes whole sums of its columns, each of its blocks over a run of K, and adds them in
order of k through its blocks' shared memory. More blocks to a cluster make an even cut of few
columns possible; fewer leave less to add.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from thor_dflash.plugins.linear.layout import PIECE_TILES, Group, Kind, Layout, Piece
from thor_dflash.tensors import Array

OFFSET_UNIT = 512
"""Bytes; offsets into the packed weight are given to the kernel in this unit."""

PARTS = (2, 4, 8)
"""Blocks a cluster may have. 8 is the most that every device takes. Source: CUDA C++ Programming
Guide, Thread Block Clusters."""

FIT = {2: 1.0, 4: 0.9, 8: 0.85}
"""Share of a device's blocks that clusters of so many can be at the same time: a cluster lies in
one set of multiprocessors, and sets differ in size. An H100 takes 1, 0.94 and 0.91."""

END = 12 * 2304
"""What the end of an item costs a block, in bytes it could have read: 2.5 us, traced on an H100."""

ROWS = 0.4 * 2048
"""What the rows of a half step cost a block, in the same measure: they come from the L2 cache. An
estimate."""

WORK = {Kind.NVFP4: 1.0, Kind.FP8: 0.6, Kind.BF16: 0.4}
"""What a byte of weight costs a block: less where less is to be decoded and multiplied for it. All
blocks together are bound by memory; one that has more bytes than others is not. An estimate."""

WARPS = 8
NARROW = 2
"""Tiles of an item up to which each has half of the block's warps, and not a quarter."""
HALF = 64
"""Of K, half a step."""


@dataclass(frozen=True, slots=True)
class Partition:
    """The items of every cluster, in the order in which it makes them."""

    parts: int
    """Blocks of a cluster."""
    clusters: tuple[tuple[Piece, ...], ...]

    @property
    def most_items(self) -> int:
        """Items of the cluster that has most."""
        return max(map(len, self.clusters))

    def item_table(self) -> Array:
        """int32 [clusters, most_items, 4]: offset / 512 of the first n-tile, bytes / 512 of a step,
        first packed column, kind | tiles << 8 | items that follow << 16.
        """
        table = np.zeros((len(self.clusters), self.most_items, 4), np.int32)
        for cluster, items in zip(table, self.clusters, strict=True):
            for left, row, i in zip(range(len(items) - 1, -1, -1), cluster, items, strict=False):
                row[:2] = i.offset // OFFSET_UNIT, i.group.step_bytes // OFFSET_UNIT
                row[2:] = i.column, i.group.kind | i.tiles << 8 | left << 16
        return table


def halves(plan: Layout, parts: int) -> list[range]:
    """Half steps of K of each block of a cluster."""
    count = -(-plan.k // HALF)
    return [range(count * i // parts, count * (i + 1) // parts) for i in range(parts)]


@lru_cache(maxsize=256)
def partition(plan: Layout, multiprocessors: int, each: int) -> Partition:
    """Cut a layout for a device whose multiprocessors take `each` blocks. No cluster is left
    without work; the cut with the shortest run of its busiest block is taken, of equals the one
    with the smallest clusters.
    """
    found = [_cut(plan, p, clusters(p, multiprocessors, each)) for p in _parts(plan)]
    return min(found, key=lambda cut: _cost(plan, cut))


def clusters(parts: int, multiprocessors: int, each: int) -> int:
    """Clusters that run at the same time."""
    return max(1, int(multiprocessors * each * FIT[parts] / parts))


def _parts(plan: Layout) -> Iterator[int]:
    return (p for p in PARTS if p == PARTS[0] or p <= -(-plan.k // HALF))


def _cut(plan: Layout, parts: int, count: int) -> Partition:
    """The best of several widths of items."""
    cuts = [_dealt(plan, parts, count, width) for width in range(PIECE_TILES, 0, -1)]
    return min(cuts, key=lambda cut: _cost(plan, cut))


def _dealt(plan: Layout, parts: int, count: int, width: int) -> Partition:
    """Every piece to the cluster that has least, the longest first. Wide pieces as long as every
    cluster gets equally many, then pieces of `width`.
    """
    wide = [p for group in plan.groups for p in group.pieces(_tiles(group, PIECE_TILES))]
    whole = len(wide) // count * count
    rest: list[Piece] = []
    for piece in wide[whole:]:
        group, own = piece.group, _tiles(piece.group, width)
        if not rest or rest[-1].group is not group:
            rest += group.pieces(own, piece.first)
    pieces = sorted(wide[:whole] + rest, key=lambda p: -_piece_cost(plan, p, parts))
    heap = [(0.0, i) for i in range(min(count, len(pieces)))]
    dealt: list[list[Piece]] = [[] for _ in heap]
    for piece in pieces:
        load, i = heapq.heappop(heap)
        dealt[i].append(piece)
        heapq.heappush(heap, (load + _piece_cost(plan, piece, parts), i))
    return Partition(parts, tuple(map(tuple, dealt)))


def _tiles(group: Group, width: int) -> int:
    """As many n-tiles of a wider kind as are the work of `width` of NVFP4."""
    return max(1, width // group.kind.slots)


def lanes(piece: Piece, parts: int) -> int:
    """n-tiles, there or not, that a block's warps are dealt to; as Item::lanes in ring.cuh."""
    if piece.tiles > NARROW or parts > 4:
        return 4
    return 1 if piece.tiles == 1 and parts == 2 and piece.group.kind is not Kind.NVFP4 else NARROW


def _piece_cost(plan: Layout, piece: Piece, parts: int) -> float:
    """Bytes that the busiest block of a cluster streams for a piece, with what its end costs."""
    longest = max(map(len, halves(plan, parts)))
    kind = piece.group.kind
    phases = WARPS // lanes(piece, parts)  # the warps of an n-tile take slots in turn
    turns = -(-longest * kind.slots // phases) * phases
    weights = turns * piece.tiles * kind.slot_bytes * WORK[kind]
    return weights + turns / kind.slots * ROWS + END


def _cost(plan: Layout, cut: Partition) -> float:
    return max(sum(_piece_cost(plan, p, cut.parts) for p in items) for items in cut.clusters)
