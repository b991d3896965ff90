"""Where the parts of a packed weight lie: what packing writes and every kernel reads.

The segments of a call lie side by side as packed columns, 64 columns to an n-tile, and up to twelve
n-tiles of one kind to a group; the gate and up of a swiglu alternate every 8 columns. A group is
stored by steps of 128 of K, then n-tile, then half a step, then slots; see units.cuh for a slot.

A few n-tiles may be stored as four narrow ones, of 16 columns: a cluster can have one of these
beside n-tiles, so that work which is a little more than a whole number of n-tiles is cut evenly.
The others keep slots whose words a lane loads four at a time: in quarters it would load each by
itself, 14 more instructions in a loop of 320.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from itertools import groupby

from thor_dflash.plugins.launch import Site
from thor_dflash.tensors import DType

SLOT_WEIGHTS = 2048
"""Bytes of weights in a slot of any kind; those of NVFP4, its codes, come before its scales."""


class Kind(IntEnum):
    """How a weight is stored; the numbers are those of units.cuh."""

    NVFP4 = 0
    FP8 = 1
    BF16 = 2

    @property
    def slots(self) -> int:
        """Slots that 64 columns x 64 of K take."""
        return 1 << self

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot: of weights, and the block scales of NVFP4."""
        return SLOT_WEIGHTS + (256 if self is Kind.NVFP4 else 0)

    @property
    def step_bytes(self) -> int:
        """Bytes of one n-tile x one step of K."""
        return 2 * self.slots * self.slot_bytes


KIND_OF = {DType.U8: Kind.NVFP4, DType.FP8: Kind.FP8, DType.BF16: Kind.BF16}
"""Stored element type of `weight#` -> kind. Others are refused."""

STEP = 128
"""Of K, the unit of work."""
TILE = 64
"""Columns of an n-tile."""
STRIP = 8
"""Columns of one matrix fragment; a strip belongs to one segment."""
GROUP_TILES = 12
"""Most n-tiles of a group: cut evenly in pieces of 1 to 4."""
PIECE_TILES = 4
"""Most n-tiles that a block makes at a time."""
HALF_TILE = 32
"""Columns of half an n-tile: what one warp brings to an end."""
NARROW = 16
"""Columns of a narrow tile."""
NARROW_IN_TILE = TILE // NARROW

CLUSTERS = 132
"""Clusters of two blocks on the largest device that is aimed at, an H100: sizes alone decide how a
weight is packed, and any other device can cut it."""
ROUNDS = range(4, 8)
"""n-tiles of every cluster where some are stored narrow. With fewer, there might not be an item for
each narrow tile to go with; with more, one n-tile more is little."""


@dataclass(frozen=True, slots=True)
class Strip:
    """8 packed columns: columns `column`.. of segment `segment`."""

    segment: int
    column: int


@dataclass(frozen=True, slots=True)
class Group:
    """Up to 768 packed columns of one kind."""

    offset: int
    """Of its first byte in the packed weight; a multiple of 512."""
    kind: Kind
    tiles: int
    column: int
    """First packed column."""
    narrow: bool = False
    """Whether each slot is stored as four, of 16 columns."""

    @property
    def step_bytes(self) -> int:
        """Bytes of one step of K."""
        return self.tiles * self.kind.step_bytes

    def pieces(self, width: int, first: int = 0) -> Iterator[Piece]:
        """Its n-tiles from `first` on, `width` at a time."""
        for tile in range(first, self.tiles, width):
            yield Piece(self, tile, min(width, self.tiles - tile))


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbouring n-tiles of a group, or half of one."""

    group: Group
    first: int
    """Of the group's n-tiles."""
    tiles: int
    half: int | None = None
    """Where the piece is half of a bf16 n-tile: which. The columns of a half lie together in a slot
    of that kind alone."""

    @property
    def offset(self) -> int:
        """Of its first byte in the packed weight; a multiple of 512."""
        kind = self.group.kind
        own = (self.half or 0) * kind.slot_bytes // 2
        return self.group.offset + self.first * kind.step_bytes + own

    @property
    def column(self) -> int:
        """First packed column."""
        return self.group.column + self.first * TILE + (self.half or 0) * HALF_TILE

    @property
    def columns(self) -> int:
        """Packed columns."""
        return self.tiles * TILE if self.half is None else HALF_TILE

    @property
    def step_bytes(self) -> int:
        """Bytes of one step of K."""
        return self.columns * self.group.kind.step_bytes // TILE

    @property
    def slots(self) -> int:
        """What a warp takes at once of its n-tile, of 64 of K: a slot, or the halves of two."""
        return self.group.kind.slots if self.half is None else self.group.kind.slots // 2


@dataclass(frozen=True, slots=True)
class NarrowTile:
    """16 columns of a narrow group."""

    group: Group
    index: int
    """Of the group's narrow tiles."""

    @property
    def offset(self) -> int:
        """Of its first byte in the packed weight; a multiple of 64."""
        tile, quarter = divmod(self.index, NARROW_IN_TILE)
        kind = self.group.kind
        return (
            self.group.offset + tile * kind.step_bytes + quarter * kind.slot_bytes // NARROW_IN_TILE
        )

    @property
    def column(self) -> int:
        """First packed column."""
        return self.group.column + self.index * NARROW


@dataclass(frozen=True, slots=True)
class Layout:
    """The packed weight of one call."""

    k: int
    kinds: tuple[Kind, ...]
    widths: tuple[int, ...]
    """Columns of each segment."""
    groups: tuple[Group, ...]
    strips: tuple[Strip | None, ...]
    """By packed column / 8; None is padding."""

    @property
    def steps(self) -> int:
        """Steps of K, the last one padded with zeros."""
        return -(-self.k // STEP)

    @property
    def columns(self) -> int:
        """Packed columns, padding included."""
        return len(self.strips) * STRIP

    @property
    def nbytes(self) -> int:
        """Size of the packed weight."""
        last = self.groups[-1]
        return last.offset + self.steps * last.step_bytes

    @property
    def narrow(self) -> tuple[NarrowTile, ...]:
        """Every narrow tile."""
        groups = (group for group in self.groups if group.narrow)
        return tuple(NarrowTile(g, i) for g in groups for i in range(g.tiles * NARROW_IN_TILE))

    def padding(self, piece: Piece) -> bool:
        """Whether no column of it belongs to a segment."""
        first = piece.column // STRIP
        return not any(self.strips[first : first + piece.columns // STRIP])


def segments(site: Site) -> tuple[tuple[Kind, ...], tuple[int, ...]]:
    """Kind and columns of each segment, before packing (from `weight#`) or after (from `kinds`)."""
    count = site.attributes.integer("segments") if site.op.name == "linear" else 1
    if "weight0" in site:
        weights = [site.ports[f"weight{i}"] for i in range(count)]
        return tuple(KIND_OF[w.dtype] for w in weights), tuple(w.shape[0] for w in weights)
    # An axis of 0 is no segment: it leaves `kinds` without bytes.
    kinds = tuple(Kind(size - 1) for size in site.ports["kinds"].shape if size)
    if site.op.name == "head":
        return kinds, (site.size("logits", 1),)
    if site.attributes.word("epilogue") == "swiglu":
        return kinds, (site.size("y0", 1),) * 2
    return kinds, tuple(site.size(f"y{i}", 1) for i in range(count))


def layout(site: Site) -> Layout:
    """The layout of a call's packed weight."""
    kinds, widths = segments(site)
    swiglu = site.op.name == "linear" and site.attributes.word("epilogue") == "swiglu"
    return _layout(site.size("x", 1), kinds, widths, swiglu)


@lru_cache(maxsize=256)
def _layout(k: int, kinds: tuple[Kind, ...], widths: tuple[int, ...], swiglu: bool) -> Layout:
    groups: list[Group] = []
    strips: list[Strip | None] = []
    offset = 0
    for kind, run in groupby(range(len(kinds)), key=kinds.__getitem__):
        start = len(strips)
        by_segment = [[Strip(s, c) for c in range(0, widths[s], STRIP)] for s in run]
        if swiglu:
            by_segment = [[s for pair in zip(*by_segment, strict=True) for s in pair]]
        strips += [strip for part in by_segment for strip in part]
        strips += [None] * (-len(strips) % (TILE // STRIP))
        tiles = (len(strips) - start) * STRIP // TILE
        narrow = narrow_tiles(tiles) if swiglu and kind is Kind.NVFP4 else 0
        for first, end in ((0, tiles - narrow), (tiles - narrow, tiles)):
            for tile in range(first, end, GROUP_TILES):
                column = start * STRIP + tile * TILE
                count = min(GROUP_TILES, end - tile)
                groups.append(Group(offset, kind, count, column, narrow=first > 0))
                offset += -(-k // STEP) * groups[-1].step_bytes
    return Layout(k, kinds, widths, tuple(groups), tuple(strips))


def narrow_tiles(tiles: int) -> int:
    """How many n-tiles of a swiglu in NVFP4 are stored narrow: those that `CLUSTERS` do not share
    evenly, where each has to take but one narrow tile for them. Of other products the sums of
    squares, by 32 columns, forbid it.
    """
    each, left = divmod(tiles, CLUSTERS)
    return left if each in ROUNDS and left * NARROW_IN_TILE <= CLUSTERS else 0
