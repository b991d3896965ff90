"""Where the parts of a packed weight lie: what packing writes and every kernel reads.

The segments of a call lie side by side as packed columns, 64 columns to an n-tile, and up to twelve
n-tiles of one kind to a group; the gate and up of a swiglu alternate every 8 columns. A group is
stored by steps of 128 of K, then n-tile, then half a step, then slots; see units.cuh for a slot.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from itertools import groupby

from thor_dflash.plugins.launch import Site
from thor_dflash.tensors import DType


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
        """Bytes of one slot: 2048 of weights, and the block scales of NVFP4."""
        return 2304 if self is Kind.NVFP4 else 2048

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
    """Neighbouring n-tiles of a group."""

    group: Group
    first: int
    """Of the group's n-tiles."""
    tiles: int

    @property
    def offset(self) -> int:
        """Of its first byte in the packed weight; a multiple of 512."""
        return self.group.offset + self.first * self.group.kind.step_bytes

    @property
    def column(self) -> int:
        """First packed column."""
        return self.group.column + self.first * TILE

    @property
    def step_bytes(self) -> int:
        """Bytes of one step of K."""
        return self.tiles * self.group.kind.step_bytes


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


def segments(site: Site) -> tuple[tuple[Kind, ...], tuple[int, ...]]:
    """Kind and columns of each segment, before packing (from `weight#`) or after (from `kinds`)."""
    count = site.attributes.integer("segments") if site.op.name == "linear" else 1
    if "weight0" in site:
        weights = [site.ports[f"weight{i}"] for i in range(count)]
        return tuple(KIND_OF[w.dtype] for w in weights), tuple(w.shape[0] for w in weights)
    kinds = tuple(Kind(size - 1) for size in site.ports["kinds"].shape)
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
        for first in range(0, tiles, GROUP_TILES):
            column = start * STRIP + first * TILE
            groups.append(Group(offset, kind, min(GROUP_TILES, tiles - first), column))
            offset += -(-k // STEP) * groups[-1].step_bytes
    return Layout(k, kinds, widths, tuple(groups), tuple(strips))
