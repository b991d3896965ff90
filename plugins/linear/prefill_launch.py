"""linear for more than 32 rows: a launch for the prologue, then a tiled product.

The product takes 2 T N K FLOP and moves N K (9/16, 1 or 2) + 2 T (K + N) bytes; above about
T = 200 it is bound by the matrix units.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from thor_dflash.core.tensors import Array
from thor_dflash.plugins.launch import (
    Argument,
    CallSite,
    Choice,
    Device,
    Int,
    Launch,
    Pointer,
    PointerTable,
    Table,
)
from thor_dflash.plugins.linear.decode_launch import Epilogue, strip_table
from thor_dflash.plugins.linear.layout import (
    PIECE_TILES,
    PackedLayout,
    TileGroup,
    WeightTile,
    layout,
)
from thor_dflash.plugins.linear.partition import WORTH
from thor_dflash.plugins.linear.prologue_launch import SLAB, prepared

FEWEST_STAGES = 2
"""Fewest stages of the ring with which the kernel works."""
MOST_STAGES = 6
"""Stages of the ring beyond which more bring nothing."""
THREADS = 256
BARRIER_BYTES = 2 * 8
"""Barriers of one stage."""
OFFSET_UNIT = 512
"""Unit of a piece's offset, bytes."""
NARROW = 3
"""Kind number of n-tiles that are stored narrow, as in fragments.cuh."""
HIGH, LOW = 128, 64
"""Rows of an item."""
WIDE, SLIM = PIECE_TILES, PIECE_TILES // 2
"""n-tiles of an item. In a slim item only half of a block's warps multiply, one per scheduler."""
ONE_OUTPUT = (Epilogue.SWIGLU, Epilogue.RESIDUAL)
COSTS = {(WIDE, HIGH): 1.0, (WIDE, LOW): 0.61, (SLIM, HIGH): 0.626, (SLIM, LOW): 0.404}
"""Relative time that an item takes on a multiprocessor, to a few percent: measured with steps of
2,048 rows cut into items of one size only, on 16 multiprocessors of an H100.
Source: part 15 of the diary, git tag measurements-diary."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """The items of a launch, in the order in which blocks take them."""

    pieces: tuple[WeightTile, ...]
    height: int
    """Rows of a tile, HIGH or LOW."""
    tiles: int
    whole: int
    """The first `whole` tiles are one item each; the others are cut into two items of LOW rows."""

    @property
    def items(self) -> int:
        """Number of items of the launch."""
        return 2 * self.tiles - self.whole


def launches(site: CallSite, device: Device) -> tuple[Launch, ...]:
    """Returns the launches of a call with more than 32 rows."""
    rows, before = prepared(site, slabs=True)
    return (*before, _product(site, device, rows))


def _product(site: CallSite, device: Device, rows: Argument) -> Launch:
    plan = layout(site)
    t, k = site.ports["x"].shape
    blocks = device.multiprocessors
    choice = device.choice(site)
    found = tiling(plan, t, blocks, **choice) if choice else cut(plan, t, blocks)
    stage = _stage_bytes(plan, found.height)
    stages = max(FEWEST_STAGES, min(MOST_STAGES, device.shared // stage))
    epilogue = Epilogue[site.attributes.word("epilogue").upper()]
    outputs = 1 if epilogue in ONE_OUTPUT else len(plan.widths)
    biases = tuple(f"bias{i}" for i in range(len(plan.widths)))
    biased = "bias0" in site
    return Launch(
        kernel="linear_prefill",
        source="prefill.cu",
        grid=(min(found.items, blocks), 1, 1),
        threads=THREADS,
        arguments=(
            rows,
            Pointer("packed"),
            Pointer("scales"),
            Table(_table(found.pieces)),
            Table(strip_table(plan)),
            Pointer("residual"),
            PointerTable(tuple(f"y{i}" for i in range(outputs))),
            Int(t),
            Int(k),
            Int(len(found.pieces)),
            Int(found.whole),
            *((PointerTable(biases),) if biased else ()),
        ),
        shared=stages * stage,
        defines={
            "TILE_ROWS": found.height,
            "STAGES": stages,
            "KINDS": sum(1 << kind for kind in {_kind(group) for group in plan.groups}),
            "EPILOGUE": epilogue,
            **({"BIAS": 1} if biased else {}),
        },
    )


@lru_cache(maxsize=256)
def cut(plan: PackedLayout, rows: int, blocks: int) -> Tiling:
    """Returns the cut whose busiest block finishes first. Ties go to the widest items, then to the
    fewest halves, since cutting makes several items read the same rows or weights.
    """
    return min(_cuts(plan, rows, blocks), key=lambda found: _longest(found, blocks))


def _cuts(plan: PackedLayout, rows: int, blocks: int) -> Iterator[Tiling]:
    """Yields cuts into whole tiles only, and cuts into full rounds of whole tiles, then halves."""
    height = LOW if rows <= LOW else HIGH
    for width in (WIDE, SLIM):
        yield tiling(plan, rows, blocks, width, height, 0)
        if height == HIGH:
            yield tiling(plan, rows, blocks, width, height, 1)


def tiling(
    plan: PackedLayout, rows: int, blocks: int, width: int, height: int, halves: int
) -> Tiling:
    """Returns the cut into items of `width` n-tiles and `height` rows, with `halves` those after
    the last full round in two.
    """
    pieces = tuple(piece for group in plan.groups for piece in group.pieces(width))
    tiles = -(-rows // height) * len(pieces)
    return Tiling(pieces, height, tiles, tiles // blocks * blocks if halves else tiles)


def candidates(site: CallSite, device: Device) -> tuple[Choice, ...]:
    """Returns the `Candidates` of a call with more than 32 rows: sizes of its items."""
    plan, rows, blocks = layout(site), site.size("x", 0), device.multiprocessors
    rule = cut(plan, rows, blocks)
    most = WORTH * _longest(rule, blocks)
    found: dict[Tiling, Choice] = {}
    for width in (WIDE, SLIM):
        for height, halves in ((HIGH, 0), (HIGH, 1), (LOW, 0)):
            if height == LOW or rows > LOW:
                made = tiling(plan, rows, blocks, width, height, halves)
                choice = {"width": width, "height": height, "halves": halves}
                if _longest(made, blocks) <= most:
                    found.setdefault(made, choice)
    return (found.pop(rule), *found.values())


def _longest(found: Tiling, blocks: int) -> float:
    """Cost of the busiest block, where block b makes the items b, b + blocks, b + 2 blocks, ..."""
    row_tiles = found.tiles // len(found.pieces)
    widths = [WIDE if piece.tiles > SLIM else SLIM for piece in found.pieces]
    tall = np.repeat([COSTS[width, found.height] for width in widths], row_tiles)
    low = np.repeat([COSTS[width, LOW] for width in widths], row_tiles)
    costs = np.concatenate([tall[: found.whole], np.repeat(low[found.whole :], 2)])
    padded = np.pad(costs, (0, -len(costs) % blocks))
    return float(padded.reshape(-1, blocks).sum(0).max())


def _stage_bytes(plan: PackedLayout, height: int) -> int:
    """Bytes of one stage, which holds half a step of K: rows, the n-tiles of a piece of the largest
    kind, barriers.
    """
    weights = PIECE_TILES * max(plan.kinds).step_bytes // 2
    return height * 2 * SLAB + weights + BARRIER_BYTES


def _table(pieces: Sequence[WeightTile]) -> Array:
    """int32 [pieces, 4]: offset in units of 512 bytes; kind | n-tiles of the group << 8; n-tiles of
    the piece; first packed column.
    """
    rows = [
        (p.offset // OFFSET_UNIT, _kind(p.group) | p.group.tiles << 8, p.tiles, p.column)
        for p in pieces
    ]
    return np.array(rows, np.int32)


def _kind(group: TileGroup) -> int:
    return NARROW if group.narrow else group.kind
