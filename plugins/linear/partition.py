"""How the work of a product with few rows is cut: columns between clusters, K between the blocks of
one.

A cluster makes whole sums of its columns, each of its blocks over a run of K, and adds them in
order of k through its blocks' shared memory. More blocks to a cluster make an even cut of few
columns possible; fewer leave less to add.

A narrow tile goes with an item of n-tiles: it shares their rows and their end, and all warps of the
block share its products. By the costs below, one of gate and up is a twentieth of four n-tiles; as
an item of its own it would be a fifth.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from thor_dflash.plugins.linear.layout import (
    NARROW_IN_TILE,
    PIECE_TILES,
    Group,
    Kind,
    Layout,
    NarrowTile,
    Piece,
)
from thor_dflash.tensors import Array

OFFSET_UNIT = 512
"""Bytes; offsets into the packed weight are given to the kernel in this unit."""
NARROW_UNIT = 64
"""The same for narrow tiles."""

PARTS = (2, 4, 8)
"""Blocks a cluster may have. 8 is the most that every device takes. Source: CUDA C++ Programming
Guide, Thread Block Clusters."""

FIT = {2: 1.0, 4: 0.9, 8: 0.85}
"""Share of a device's blocks that clusters of so many can be at the same time: a cluster lies in
one set of multiprocessors, and sets differ in size. An H100 takes 1, 0.93 and 0.91."""

END = 12 * 2304
"""What the end of an item costs a block, in bytes it could have read: 2.5 us, traced on an H100."""

ROWS = 0.4 * 2048
"""What the rows of a half step cost a block, in the same measure: they come from the L2 cache. An
estimate."""

WORK = {Kind.NVFP4: 1.0, Kind.FP8: 0.85, Kind.BF16: 0.75}
"""What a byte of weight costs a block: less where less is to be decoded and multiplied for it. That
of bf16 is from a trace on an H100, where blocks with one n-tile of it took 24 us and those with two
of NVFP4 19; halves have not been traced. That of FP8 is an estimate."""

WARPS, EACH = 8, 2
"""Of a block; blocks that share a multiprocessor."""
SLIM, SLIM_EACH = 4, 3
"""The same of a smaller block, and how many of these share a multiprocessor where two of the others
would. Few columns leave some multiprocessors two blocks and others one, and with three n-tiles of
four some schedulers half of the work: two n-tiles and three blocks make the 50 MB of down_proj 20.2
us instead of 24.8, measured on an H100."""
SCHEDULERS = 4
"""Of a multiprocessor; a block's warps go round them."""
WARP_TILES = 2
"""n-tiles of an item up to which each has half of the block's warps, and not a quarter."""
HALF = 64
"""Of K, half a step."""


@dataclass(frozen=True, slots=True)
class Item:
    """What a cluster makes at a time."""

    piece: Piece
    narrow: NarrowTile | None = None


@dataclass(frozen=True, slots=True)
class Partition:
    """The items of every cluster, in the order in which it makes them."""

    warps: int
    """That multiply, of a block."""
    each: int
    """Blocks that a multiprocessor takes."""
    parts: int
    """Blocks of a cluster."""
    clusters: tuple[tuple[Item, ...], ...]

    @property
    def most_items(self) -> int:
        """Items of the cluster that has most."""
        return max(map(len, self.clusters))

    def item_table(self) -> Array:
        """int32 [clusters, most_items, 2, 4]: offset / 512 of the first n-tile, bytes / 512 of a
        step, first packed column, kind | half an n-tile << 2 | n-tiles << 8 | items that follow
        << 16; then of the narrow tile offset / 64, bytes / 512 of a step, first packed column, 0;
        or -1 for that column.
        """
        table = np.zeros((len(self.clusters), self.most_items, 2, 4), np.int32)
        for cluster, items in zip(table, self.clusters, strict=True):
            for left, row, i in zip(range(len(items) - 1, -1, -1), cluster, items, strict=False):
                row[0], row[1] = _piece_words(i.piece, left), (0, 0, -1, 0)
                if i.narrow is not None:
                    step = i.narrow.group.step_bytes // OFFSET_UNIT
                    row[1] = i.narrow.offset // NARROW_UNIT, step, i.narrow.column, 0
        return table


def _piece_words(piece: Piece, left: int) -> tuple[int, int, int, int]:
    half = 0 if piece.half is None else 1 << 2
    rest = piece.group.kind | half | piece.tiles << 8 | left << 16
    step = piece.group.step_bytes // OFFSET_UNIT
    return piece.offset // OFFSET_UNIT, step, piece.column, rest


def halves(plan: Layout, parts: int) -> list[range]:
    """Half steps of K of each block of a cluster: whole steps, but for the last one's padding."""
    count = -(-plan.k // HALF)
    bounds = [min(count, plan.steps * i // parts * 2) for i in range(parts + 1)]
    return [range(begin, end) for begin, end in itertools.pairwise(bounds)]


@lru_cache(maxsize=256)
def partition(plan: Layout, multiprocessors: int) -> Partition:
    """Cut a layout for a device. No cluster is left without work; the cut with the shortest run of
    its busiest multiprocessor is taken, of equals the one with the largest blocks and the smallest
    clusters.
    """
    shapes = [(WARPS, EACH), *([] if plan.narrow else [(SLIM, SLIM_EACH)])]
    found = [
        _dealt(
            plan, Partition(warps, some, parts, ()), clusters(parts, multiprocessors, some), width
        )
        for warps, some in shapes
        for parts in _parts(plan)
        for width in range(_most_tiles(warps), 0, -1)
    ]
    return min(found, key=lambda cut: _cost(plan, cut))


def clusters(parts: int, multiprocessors: int, each: int) -> int:
    """Clusters that run at the same time."""
    return max(1, int(multiprocessors * each * FIT[parts] / parts))


def _parts(plan: Layout) -> Iterator[int]:
    """Two blocks have room for the sums of a narrow tile, more have not."""
    parts = PARTS[:1] if plan.narrow else PARTS
    return (p for p in parts if p == PARTS[0] or p <= plan.steps)


def _most_tiles(warps: int) -> int:
    """n-tiles of an item: two warps for each at least."""
    return min(PIECE_TILES, warps // 2)


def _dealt(plan: Layout, cut: Partition, count: int, width: int) -> Partition:
    """Every piece to the cluster that has least, the longest first. Wide pieces as long as every
    cluster gets equally many, then pieces of `width`; at last the narrow tiles.
    """
    most = _most_tiles(cut.warps)
    wide = [p for g in plan.groups if not g.narrow for p in _pieces(plan, g, most)]
    whole = len(wide) // count * count
    rest: list[Piece] = []
    for piece in wide[whole:]:
        if not rest or rest[-1].group is not piece.group:
            pieces = _pieces(plan, piece.group, width, piece.first)
            rest += [p for p in pieces if _place(p) >= _place(piece)]
    ordered = sorted(wide[:whole] + rest, key=lambda p: -_piece_cost(plan, p, cut))
    heap = [(0.0, i) for i in range(min(count, len(ordered)))]
    dealt: list[list[Item]] = [[] for _ in heap]
    for piece in ordered:
        load, i = heapq.heappop(heap)
        dealt[i].append(Item(piece))
        heapq.heappush(heap, (load + _piece_cost(plan, piece, cut) + END, i))
    _deal_narrow(plan, cut, heap, dealt)
    return replace(cut, clusters=tuple(map(tuple, dealt)))


def _place(piece: Piece) -> tuple[int, int]:
    """In its group: the first n-tile, and half of it."""
    return piece.first, piece.half or 0


def _deal_narrow(
    plan: Layout, cut: Partition, heap: list[tuple[float, int]], dealt: list[list[Item]]
) -> None:
    """To the cluster that has least, of those with an item that has none yet."""
    given = [0] * len(dealt)
    for tile in plan.narrow:
        load, i = heapq.heappop(heap)
        items, at = dealt[i], given[i]
        items[at] = Item(items[at].piece, tile)
        given[i] += 1
        if given[i] < len(items):
            heapq.heappush(heap, (load + _narrow_cost(plan, cut), i))


def _pieces(plan: Layout, group: Group, width: int, first: int = 0) -> Iterator[Piece]:
    """From an n-tile on, as many of a wider kind as are the work of `width` of NVFP4, or halves of
    bf16 ones; no halves that are padding.
    """
    slots = group.kind.slots
    if group.kind is not Kind.BF16 or width >= slots:
        return group.pieces(max(1, width // slots), first)
    found = (Piece(group, t, 1, half) for t in range(first, group.tiles) for half in (0, 1))
    return (piece for piece in found if not plan.padding(piece))


def lanes(plan: Layout, piece: Piece, cut: Partition) -> int:
    """n-tiles, there or not, that a block's warps are dealt to; as Item::lanes in ring.cuh."""
    if cut.warps == SLIM or piece.tiles > WARP_TILES or cut.parts > 4 or plan.narrow:
        return cut.warps // 2
    alone = piece.tiles == 1 and cut.parts == 2 and piece.group.kind is not Kind.NVFP4
    return 1 if alone else WARP_TILES


def _piece_cost(plan: Layout, piece: Piece, cut: Partition) -> float:
    """Bytes that the busiest block of a cluster streams for a piece; as many as if all schedulers
    had as much to do as the busiest one.
    """
    phases = cut.warps // lanes(plan, piece, cut)
    turns = _turns(plan, piece.slots, cut.parts, phases)
    busy = -(-piece.tiles * phases // SCHEDULERS) * SCHEDULERS / (piece.tiles * phases)
    weights = busy * turns * piece.step_bytes / (2 * piece.slots) * WORK[piece.group.kind]
    return weights + turns / piece.slots * ROWS


def _narrow_cost(plan: Layout, cut: Partition) -> float:
    """What a narrow tile adds to its item: nothing at the end, which is an estimate."""
    kind = Kind.NVFP4
    turns = _turns(plan, kind.slots, cut.parts, WARPS // PIECE_TILES)
    return turns * kind.slot_bytes / NARROW_IN_TILE * WORK[kind]


def _turns(plan: Layout, slots: int, parts: int, phases: int) -> int:
    """Slots of the block that has most, `slots` to 64 of K, in whole stages: the warps of an n-tile
    take them in turn.
    """
    longest = max(map(len, halves(plan, parts)))
    return -(-longest * slots // phases) * phases


def _item_cost(plan: Layout, item: Item, cut: Partition) -> float:
    narrow = 0.0 if item.narrow is None else _narrow_cost(plan, cut)
    return _piece_cost(plan, item.piece, cut) + narrow


def _cost(plan: Layout, cut: Partition) -> float:
    """Of the busiest multiprocessor: its blocks share it, and wait for the ends of items together.
    It is taken to have as many as it can: which one gets a block does not ask what others have.
    """
    return max(
        sum(cut.each * _item_cost(plan, i, cut) + END for i in items) for items in cut.clusters
    )
