"""How the work of a product with few rows is cut: columns between clusters, K between the blocks of
a cluster.

Each block of a cluster computes partial sums of the cluster's columns over a range of K. These are
added in order of k through the blocks' shared memory. With more blocks per cluster, few columns can
still be shared evenly; with fewer blocks there are fewer partial sums to add.

A narrow tile is computed together with an item of n-tiles: it shares their rows and their epilogue,
and all warps of the block share its products. By the costs below, a narrow tile of gate and up
costs a twentieth of four n-tiles; as an item of its own it would cost a fifth.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from thor_dflash.core.tensors import Array
from thor_dflash.plugins.linear.layout import (
    NARROW_IN_TILE,
    PIECE_TILES,
    NarrowTile,
    PackedLayout,
    TileGroup,
    WeightKind,
    WeightTile,
)

OFFSET_UNIT = 512
"""Unit in which offsets into the packed weight are passed to the kernel, bytes."""
NARROW_UNIT = 64
"""The same for narrow tiles, bytes."""

PARTS = (2, 4, 8)
"""Cluster sizes, in blocks. 8 is the largest that every device supports. Source: CUDA C++
Programming Guide, Thread Block Clusters."""

FIT = {2: 1.0, 4: 0.9, 8: 0.85}
"""By cluster size, the fraction of a device's block slots that clusters can occupy at once: a
cluster lies within one GPC, and GPCs differ in size. On an H100 it is 1, 0.93 and 0.91."""

END = 12 * 2304
"""Cost to a block of an item's epilogue, in bytes that it could have read in that time: 2.5 us,
traced on an H100."""

ROWS = 0.4 * 2048
"""Cost to a block of reading the rows of a half step, which come from the L2 cache, in the same
unit. An estimate."""

WORK = {WeightKind.NVFP4: 1.0, WeightKind.FP8: 0.85, WeightKind.BF16: 0.75}
"""Relative cost to a block of a byte of weight, lower where a byte needs less decoding and fewer
products. BF16: from a trace on an H100, where blocks with one bf16 n-tile took 24 us and blocks
with two NVFP4 n-tiles 19 us; halves have not been traced. FP8: an estimate."""

WARPS, EACH = 8, 2
"""Multiplying warps of a block, and blocks that share a multiprocessor."""
SLIM, SLIM_EACH = 4, 3
"""The same for a smaller block. With few columns, blocks of 8 warps would leave some
multiprocessors with two blocks and others with one, and three n-tiles in operator for four leave
some schedulers half of the work. Items of two n-tiles and three blocks per multiprocessor run the
50 MB of down_proj in 20.2 us instead of 24.8 us, measured on an H100."""
BLOCKS = ((WARPS, EACH), (SLIM, SLIM_EACH))
WORTH = 1.5
"""Estimated cost, relative to the rule's cut, up to which a cut is worth a measurement."""
SCHEDULERS = 4
"""Warp schedulers of a multiprocessor; a block's warps are distributed over them in turn."""
WARP_TILES = 2
"""In items of at most this many n-tiles, each n-tile gets half of the block's warps instead of a
quarter."""
HALF = 64
"""Half a step of K."""


@dataclass(frozen=True, slots=True)
class WorkTile:
    """The work that a cluster does at a time."""

    piece: WeightTile
    narrow: NarrowTile | None = None


@dataclass(frozen=True, slots=True)
class Partition:
    """The items of every cluster, in the order in which the cluster processes them."""

    warps: int
    """Warps of a block that multiply."""
    each: int
    """Blocks that share a multiprocessor."""
    parts: int
    """Blocks of a cluster."""
    clusters: tuple[tuple[WorkTile, ...], ...]
    by_head: bool = False
    """Whether rows lack the factors 1 / rms of their heads (head_norm.cuh)."""

    @property
    def most_items(self) -> int:
        """Items of the cluster with the most items."""
        return max(map(len, self.clusters))

    @property
    def tiles(self) -> int:
        """n-tiles of every NVFP4 item; 0 if they differ."""
        items = (item for items in self.clusters for item in items)
        found = {i.piece.tiles for i in items if i.piece.group.kind is WeightKind.NVFP4}
        return found.pop() if len(found) == 1 else 0

    def item_table(self) -> Array:
        """int32 [clusters, most_items, 2, 4], two rows per item. The first row: offset / 512 of the
        first n-tile, bytes / 512 of a step, first packed column, kind | is half an n-tile << 2 |
        n-tiles << 8 | items that follow << 16. The second row, for the narrow tile: offset / 64,
        bytes / 512 of a step, first packed column (-1 without a narrow tile), 0.
        """
        table = np.zeros((len(self.clusters), self.most_items, 2, 4), np.int32)
        for cluster, items in zip(table, self.clusters, strict=True):
            for left, row, i in zip(range(len(items) - 1, -1, -1), cluster, items, strict=False):
                row[0], row[1] = _piece_words(i.piece, left), (0, 0, -1, 0)
                if i.narrow is not None:
                    step = i.narrow.group.step_bytes // OFFSET_UNIT
                    row[1] = i.narrow.offset // NARROW_UNIT, step, i.narrow.column, 0
        return table


def _piece_words(piece: WeightTile, left: int) -> tuple[int, int, int, int]:
    half = 0 if piece.half is None else 1 << 2
    rest = piece.group.kind | half | piece.tiles << 8 | left << 16
    step = piece.group.step_bytes // OFFSET_UNIT
    return piece.offset // OFFSET_UNIT, step, piece.column, rest


def halves(plan: PackedLayout, parts: int) -> list[range]:
    """Returns the half steps of K of each block of a cluster. Ranges consist of whole steps, except
    that the last one leaves out a half step that would be padding.
    """
    return _halves(plan.k, plan.steps, parts)


def _halves(k: int, steps: int, parts: int) -> list[range]:
    count = -(-k // HALF)
    bounds = [min(count, steps * i // parts * 2) for i in range(parts + 1)]
    return [range(begin, end) for begin, end in itertools.pairwise(bounds)]


@lru_cache(maxsize=256)
def _longest(k: int, steps: int, parts: int) -> int:
    """Half steps of the block with the longest range of K."""
    return max(map(len, _halves(k, steps, parts)))


@dataclass(frozen=True, slots=True)
class FirstTiles:
    """What a block computes its cluster's first item from, as FirstTiles in pipeline.cuh:
    arguments of the kernel.
    """

    loaded: int
    """Clusters that load it instead: the first ones."""
    tiles: int
    """n-tiles of the packed weight's first groups, which are NVFP4."""


def first_tiles(plan: PackedLayout, cut: Partition) -> FirstTiles:
    """Returns what the first items of a cut follow from."""
    loaded = len(cut.clusters) - _regular(plan, cut)
    return FirstTiles(loaded, sum(group.tiles for group in _first_groups(plan)))


def _first_groups(plan: PackedLayout) -> list[TileGroup]:
    """The groups before the first one that is not NVFP4."""
    return list(itertools.takewhile(lambda group: group.kind is WeightKind.NVFP4, plan.groups))


def _regular(plan: PackedLayout, cut: Partition) -> int:
    """Returns how many clusters at the end have the packed weight's first n-tiles, `tiles` at a
    time, in order, and nothing else. None with narrow tiles: see FirstTiles in pipeline.cuh.
    """
    if plan.narrow or not (tiles := cut.tiles):
        return 0
    pieces = [piece for group in _first_groups(plan) for piece in group.pieces(tiles)]
    expected = [(WorkTile(piece),) for piece in pieces]
    counts = range(min(len(expected), len(cut.clusters)), 0, -1)
    return next((n for n in counts if [*cut.clusters[-n:]] == expected[:n]), 0)


def _ordered(plan: PackedLayout, cut: Partition) -> Partition:
    """Puts clusters with the packed weight's first n-tiles last, in order, so that most first items
    can be computed. The others come first since they have to load theirs.
    """
    first = set(_first_groups(plan))
    own = [c for c in cut.clusters if c[0].piece.group in first]
    others = [c for c in cut.clusters if c[0].piece.group not in first]
    return replace(cut, clusters=(*others, *own)) if cut.most_items == 1 else cut


@dataclass(frozen=True, slots=True)
class CutChoice:
    """The parameters of a cut: a linear's `Choice` for few rows."""

    warps: int
    """Warps of a block that multiply: WARPS or SLIM."""
    parts: int
    """Blocks of a cluster."""
    clusters: int
    """Clusters among which the work is divided, if there is enough."""
    width: int
    """n-tiles of the items that are left when every cluster has equally many of the widest."""


@lru_cache(maxsize=256)
def partition(plan: PackedLayout, multiprocessors: int, *, by_head: bool = False) -> Partition:
    """Cuts a layout for a device. No cluster is left without work. Takes the cut whose busiest
    multiprocessor finishes first; ties go to the largest blocks, then to the smallest clusters.
    """
    return _ranked(plan, multiprocessors, by_head=by_head)[0][2]


@lru_cache(maxsize=256)
def cut_by(plan: PackedLayout, choice: CutChoice, *, by_head: bool = False) -> Partition:
    """Cuts a layout in a given way."""
    each = dict(BLOCKS)[choice.warps]
    cut = Partition(choice.warps, each, choice.parts, (), by_head)
    return _ordered(plan, _dealt(plan, cut, choice.clusters, choice.width))


def cut_candidates(
    plan: PackedLayout,
    multiprocessors: int,
    active: Callable[[CutChoice], int] | None,
    *,
    by_head: bool = False,
) -> tuple[CutChoice, ...]:
    """Returns the choice of `partition`, then, for each kind of block and cluster size, the cuts of
    the least estimated cost into as many clusters as FIT says and as are active at once, if they
    may be worth a try; of the rule's own kind, one more. Cuts that give the same items are returned
    once.
    """
    ranked = _ranked(plan, multiprocessors, by_head=by_head)
    least, rule, cut = ranked[0]
    found = {cut: rule}
    kinds: dict[tuple[int, int], list[tuple[float, CutChoice, Partition]]] = {}
    for one in ranked:
        kinds.setdefault((one[1].warps, one[1].parts), []).append(one)
    for cuts in kinds.values():
        best = cuts[0][1]
        tried = cuts[: 2 if best == rule else 1]
        if active and (count := max(1, active(best))) != best.clusters:
            counted = [replace(choice, clusters=count) for _, choice, _ in cuts]
            tried = [*tried, *_by_cost(plan, counted, by_head=by_head)[:1]]
        for cost, choice, cut in tried:
            if cost <= WORTH * least:
                found.setdefault(cut, choice)
    return tuple(found.values())


def _ranked(
    plan: PackedLayout, multiprocessors: int, *, by_head: bool
) -> list[tuple[float, CutChoice, Partition]]:
    """Returns all cuts that `partition` compares, with their costs, the best first."""
    choices = [
        CutChoice(warps, parts, clusters(parts, multiprocessors, each), width)
        for warps, each in BLOCKS[: 1 if plan.narrow else None]
        for parts in _parts(plan)
        for width in range(_most_tiles(warps), 0, -1)
    ]
    return _by_cost(plan, choices, by_head=by_head)


def _by_cost(
    plan: PackedLayout, choices: Iterable[CutChoice], *, by_head: bool
) -> list[tuple[float, CutChoice, Partition]]:
    """Returns the cuts of some choices with their costs, the best first; ties in their order."""
    cuts = [(choice, cut_by(plan, choice, by_head=by_head)) for choice in choices]
    return sorted(((_cost(plan, cut), choice, cut) for choice, cut in cuts), key=lambda c: c[0])


def clusters(parts: int, multiprocessors: int, each: int) -> int:
    """Returns how many clusters of `parts` blocks run at the same time."""
    return max(1, int(multiprocessors * each * FIT[parts] / parts))


def _parts(plan: PackedLayout) -> Iterator[int]:
    """Yields the possible cluster sizes. With narrow tiles only 2: in larger clusters the sums of a
    narrow tile do not fit into shared memory.
    """
    parts = PARTS[:1] if plan.narrow else PARTS
    return (p for p in parts if p == PARTS[0] or p <= plan.steps)


def _most_tiles(warps: int) -> int:
    """Most n-tiles of an item, so that each gets at least two warps."""
    return min(PIECE_TILES, warps // 2)


def _dealt(plan: PackedLayout, cut: Partition, count: int, width: int) -> Partition:
    """Assigns each piece, in order of decreasing cost, to the cluster with the least work. Pieces
    have the largest width as long as every cluster gets equally many of them; the rest is cut into
    pieces of `width` n-tiles. The narrow tiles are assigned last.
    """
    most = _most_tiles(cut.warps)
    wide = [p for g in plan.groups if not g.narrow for p in _pieces(plan, g, most)]
    whole = len(wide) // count * count
    rest: list[WeightTile] = []
    for piece in wide[whole:]:
        if not rest or rest[-1].group is not piece.group:
            pieces = _pieces(plan, piece.group, width, piece.first)
            rest += [p for p in pieces if _place(p) >= _place(piece)]
    cost = _piece_costs(plan, cut)
    ordered = sorted(wide[:whole] + rest, key=lambda piece: -cost(piece))
    heap = [(0.0, i) for i in range(min(count, len(ordered)))]
    dealt: list[list[WorkTile]] = [[] for _ in heap]
    for piece in ordered:
        load, i = heapq.heappop(heap)
        dealt[i].append(WorkTile(piece))
        heapq.heappush(heap, (load + cost(piece) + END, i))
    _deal_narrow(plan, cut, heap, dealt)
    return replace(cut, clusters=tuple(map(tuple, dealt)))


def _place(piece: WeightTile) -> tuple[int, int]:
    """Returns the position of a piece in its group: first n-tile, and which half of it."""
    return piece.first, piece.half or 0


def _deal_narrow(
    plan: PackedLayout, cut: Partition, heap: list[tuple[float, int]], dealt: list[list[WorkTile]]
) -> None:
    """Assigns each narrow tile to the cluster with the least work among those that still have an
    item without a narrow tile.
    """
    given = [0] * len(dealt)
    for tile in plan.narrow:
        load, i = heapq.heappop(heap)
        items, at = dealt[i], given[i]
        items[at] = WorkTile(items[at].piece, tile)
        given[i] += 1
        if given[i] < len(items):
            heapq.heappush(heap, (load + _narrow_cost(plan, cut), i))


def _pieces(
    plan: PackedLayout, group: TileGroup, width: int, first: int = 0
) -> Iterator[WeightTile]:
    """Yields the pieces of a group from n-tile `first` on, each with about the work of `width`
    NVFP4 n-tiles: fewer n-tiles of a kind with more bytes, or halves of bf16 n-tiles, without those
    that are padding.
    """
    slots = group.kind.slots
    if group.kind is not WeightKind.BF16 or width >= slots:
        return group.pieces(max(1, width // slots), first)
    found = (WeightTile(group, t, 1, half) for t in range(first, group.tiles) for half in (0, 1))
    return (piece for piece in found if not plan.padding(piece))


def lanes(plan: PackedLayout, piece: WeightTile, cut: Partition) -> int:
    """Returns among how many n-tiles a block's warps are divided, which may be more than the piece
    has; as WorkTile::lanes in pipeline.cuh.
    """
    if cut.warps == SLIM or piece.tiles > WARP_TILES or cut.parts > 4:
        return cut.warps // 2
    if plan.narrow or cut.by_head:
        return cut.warps // 2
    alone = piece.tiles == 1 and cut.parts == 2 and piece.group.kind is not WeightKind.NVFP4
    return 1 if alone else WARP_TILES


def _piece_costs(plan: PackedLayout, cut: Partition) -> Callable[[WeightTile], float]:
    """Returns `_piece_cost` for the pieces of one cut, computed once for pieces of one size."""
    known: dict[tuple[WeightKind, int, bool], float] = {}

    def cost(piece: WeightTile) -> float:
        size = piece.group.kind, piece.tiles, piece.half is None
        if size not in known:
            known[size] = _piece_cost(plan, piece, cut)
        return known[size]

    return cost


def _piece_cost(plan: PackedLayout, piece: WeightTile, cut: Partition) -> float:
    """Cost of a piece for the busiest block of a cluster, in bytes streamed, scaled as if every
    scheduler had as much work as the busiest one.
    """
    phases = cut.warps // lanes(plan, piece, cut)
    turns = _turns(plan, piece.slots, cut.parts, phases)
    busy = -(-piece.tiles * phases // SCHEDULERS) * SCHEDULERS / (piece.tiles * phases)
    weights = busy * turns * piece.step_bytes / (2 * piece.slots) * WORK[piece.group.kind]
    return weights + turns / piece.slots * ROWS


def _narrow_cost(plan: PackedLayout, cut: Partition) -> float:
    """Cost that a narrow tile adds to its item. Its epilogue is estimated to cost nothing."""
    kind = WeightKind.NVFP4
    turns = _turns(plan, kind.slots, cut.parts, WARPS // PIECE_TILES)
    return turns * kind.slot_bytes / NARROW_IN_TILE * WORK[kind]


def _turns(plan: PackedLayout, slots: int, parts: int, phases: int) -> int:
    """Slots of the block with the longest range of K, `slots` per 64 of K, rounded up to a multiple
    of `phases`, since the warps of an n-tile take slots in turn.
    """
    return -(-_longest(plan.k, plan.steps, parts) * slots // phases) * phases


def _cost(plan: PackedLayout, cut: Partition) -> float:
    """Cost of the busiest multiprocessor, whose blocks share its bandwidth but run their epilogues
    at the same time. It is assumed to hold as many blocks as fit: the hardware places a block
    without regard to the load of other multiprocessors.
    """
    cost, narrow = _piece_costs(plan, cut), _narrow_cost(plan, cut)

    def item(one: WorkTile) -> float:
        return cut.each * (cost(one.piece) + (narrow if one.narrow else 0.0)) + END

    return max(sum(map(item, items)) for items in cut.clusters)
