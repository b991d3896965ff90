"""The layout of a packed weight, as packing writes it and every kernel reads it.

The segments of a call lie side by side as packed columns: 64 columns make an n-tile, and up to
twelve n-tiles of one kind make a group. The gate and up weights of a swiglu alternate every 8
columns. Within a group the storage order is: step of 128 of K, n-tile, half a step, slot.
packed_weight.cuh describes a slot.

A few n-tiles may be stored as four narrow tiles of 16 columns each. A cluster can take one of these
in addition to its n-tiles, which evens out the work when there are slightly more n-tiles than the
clusters can share equally. All other n-tiles keep whole slots, from which a lane loads four words
at a time. From narrow slots it loads each word separately, which would add 14 instructions to a
loop of 320.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from itertools import groupby

from thor_dflash.core.tensors import DType
from thor_dflash.plugins.launch import CallSite

SLOT_WEIGHTS = 2048
"""Bytes of weights in a slot of any kind; in an NVFP4 slot these codes precede the scales."""


class WeightKind(IntEnum):
    """How a weight is stored; the numbers are those of packed_weight.cuh."""

    NVFP4 = 0
    FP8 = 1
    BF16 = 2

    @property
    def slots(self) -> int:
        """Slots in 64 columns x 64 of K."""
        return 1 << self

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot: the weights, and for NVFP4 the block scales."""
        return SLOT_WEIGHTS + (256 if self is WeightKind.NVFP4 else 0)

    @property
    def step_bytes(self) -> int:
        """Bytes of one n-tile x one step of K."""
        return 2 * self.slots * self.slot_bytes


KIND_OF = {DType.U8: WeightKind.NVFP4, DType.FP8: WeightKind.FP8, DType.BF16: WeightKind.BF16}
"""Stored element type of `weight#` -> kind. Other types are refused."""

STEP = 128
"""Extent along K of a step, the unit of work."""
TILE = 64
"""Columns of an n-tile."""
STRIP = 8
"""Columns of one matrix fragment; a strip belongs to one segment."""
GROUP_TILES = 12
"""Most n-tiles of a group; 12 is divisible into pieces of 1, 2, 3 or 4."""
PIECE_TILES = 4
"""Most n-tiles that a block computes at a time."""
HALF_TILE = 32
"""Columns of half an n-tile, for which one warp runs the epilogue."""
NARROW = 16
"""Columns of a narrow tile."""
NARROW_IN_TILE = TILE // NARROW

CLUSTERS = 132
"""Clusters of two blocks on the largest target device, an H100. A constant, so that the packed form
depends on the weight's size only; other devices can partition the same packed weight."""
ROUNDS = range(4, 8)
"""n-tiles per cluster for which narrow tiles are used. With fewer, a narrow tile might find no item
to join; with more, one additional n-tile matters little."""


@dataclass(frozen=True, slots=True)
class Strip:
    """8 packed columns: those from `column` on of segment `segment`."""

    segment: int
    column: int


@dataclass(frozen=True, slots=True)
class TileGroup:
    """Up to 768 packed columns of one kind."""

    offset: int
    """Of the group's first byte in the packed weight; a multiple of 512."""
    kind: WeightKind
    tiles: int
    column: int
    """First packed column."""
    narrow: bool = False
    """Whether each slot is stored as four slots of 16 columns."""

    @property
    def step_bytes(self) -> int:
        """Bytes of one step of K."""
        return self.tiles * self.kind.step_bytes

    def pieces(self, width: int, first: int = 0) -> Iterator[WeightTile]:
        """Yields the n-tiles from `first` on, `width` at a time."""
        for tile in range(first, self.tiles, width):
            yield WeightTile(self, tile, min(width, self.tiles - tile))


@dataclass(frozen=True, slots=True)
class WeightTile:
    """Neighbouring n-tiles of a group, or half of one."""

    group: TileGroup
    first: int
    """Index of the first n-tile in the group."""
    tiles: int
    half: int | None = None
    """Which half, if the piece is half of a bf16 n-tile. Only bf16 slots store the columns of a
    half contiguously."""

    @property
    def offset(self) -> int:
        """Of the piece's first byte in the packed weight; a multiple of 512."""
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
        """Units of work in 64 of K for the warps of one n-tile. A unit is a slot or, in half an
        n-tile, the halves of two slots.
        """
        return self.group.kind.slots if self.half is None else self.group.kind.slots // 2


@dataclass(frozen=True, slots=True)
class NarrowTile:
    """16 columns of a narrow group."""

    group: TileGroup
    index: int
    """Index among the group's narrow tiles."""

    @property
    def offset(self) -> int:
        """Of the tile's first byte in the packed weight; a multiple of 64."""
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
class PackedLayout:
    """The packed weight of one call."""

    k: int
    kinds: tuple[WeightKind, ...]
    widths: tuple[int, ...]
    """Columns of each segment."""
    groups: tuple[TileGroup, ...] = field(hash=False)  # they follow from the rest, and are many
    strips: tuple[Strip | None, ...] = field(hash=False)
    """Indexed by packed column / 8; None is padding."""

    @property
    def steps(self) -> int:
        """Number of steps along K; the last one is padded with zeros."""
        return -(-self.k // STEP)

    @property
    def columns(self) -> int:
        """Packed columns, padding included."""
        return len(self.strips) * STRIP

    @property
    def nbytes(self) -> int:
        """Size of the packed weight, bytes."""
        last = self.groups[-1]
        return last.offset + self.steps * last.step_bytes

    @property
    def narrow(self) -> tuple[NarrowTile, ...]:
        """Every narrow tile."""
        groups = (group for group in self.groups if group.narrow)
        return tuple(NarrowTile(g, i) for g in groups for i in range(g.tiles * NARROW_IN_TILE))

    def padding(self, piece: WeightTile) -> bool:
        """Whether the piece is padding only: none of its columns belongs to a segment."""
        first = piece.column // STRIP
        return not any(self.strips[first : first + piece.columns // STRIP])


def segments(site: CallSite) -> tuple[tuple[WeightKind, ...], tuple[int, ...]]:
    """Returns the kind and the number of columns of each segment, taken from `weight#` before
    packing and from `kinds` after.
    """
    count = site.attributes.integer("segments") if site.op.name == "linear" else 1
    if "weight0" in site:
        weights = [site.ports[f"weight{i}"] for i in range(count)]
        return tuple(KIND_OF[w.dtype] for w in weights), tuple(w.shape[0] for w in weights)
    # The axis of size 0 stands for no segment; it makes `kinds` an array without bytes.
    kinds = tuple(WeightKind(size - 1) for size in site.ports["kinds"].shape if size)
    if site.op.name == "head":
        return kinds, (site.size("logits", 1),)
    if site.attributes.word("epilogue") == "swiglu":
        return kinds, (site.size("y0", 1),) * 2
    return kinds, tuple(site.size(f"y{i}", 1) for i in range(count))


def layout(site: CallSite) -> PackedLayout:
    """Returns the layout of a call's packed weight."""
    kinds, widths = segments(site)
    swiglu = site.op.name == "linear" and site.attributes.word("epilogue") == "swiglu"
    return _layout(site.size("x", 1), kinds, widths, swiglu)


@lru_cache(maxsize=256)
def _layout(
    k: int, kinds: tuple[WeightKind, ...], widths: tuple[int, ...], swiglu: bool
) -> PackedLayout:
    groups: list[TileGroup] = []
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
        narrow = narrow_tiles(tiles) if swiglu and kind is WeightKind.NVFP4 else 0
        for first, end in ((0, tiles - narrow), (tiles - narrow, tiles)):
            for tile in range(first, end, GROUP_TILES):
                column = start * STRIP + tile * TILE
                count = min(GROUP_TILES, end - tile)
                groups.append(TileGroup(offset, kind, count, column, narrow=first > 0))
                offset += -(-k // STEP) * groups[-1].step_bytes
    return PackedLayout(k, kinds, widths, tuple(groups), tuple(strips))


def narrow_tiles(tiles: int) -> int:
    """Returns how many n-tiles of an NVFP4 swiglu are stored narrow: the remainder of sharing them
    among `CLUSTERS`, if one narrow tile per cluster is enough to cover it. Other products may
    output sums of squares over 32 columns, which a tile of 16 columns cannot.
    """
    each, left = divmod(tiles, CLUSTERS)
    return left if each in ROUNDS and left * NARROW_IN_TILE <= CLUSTERS else 0
