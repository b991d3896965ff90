"""linear for more than 32 rows: the prologue's rows first, then tiles bound by the matrix units.

2 T N K FLOP against N K (9/16, 1 or 2) + 2 T (K + N) bytes: beyond T = 200 the products decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from thor_dflash.plugins.launch import (
    Addresses,
    Argument,
    At,
    Device,
    Int,
    Launch,
    Site,
    Table,
)
from thor_dflash.plugins.linear.few import Epilogue, strip_table
from thor_dflash.plugins.linear.layout import PIECE_TILES, Group, Layout, Piece, layout
from thor_dflash.plugins.linear.prepare import SLAB, prepared
from thor_dflash.tensors import Array

FEWEST_STAGES = 2
"""Of the ring, that work."""
MOST_STAGES = 6
"""Of the ring, that help."""
THREADS = 256
BARRIER_BYTES = 2 * 8
"""Of a stage."""
OFFSET_UNIT = 512
"""Of a piece's offset, bytes."""
NARROW = 3
"""As in prefill.cu: the kind of n-tiles that are stored narrow."""
HIGH, LOW = 128, 64
"""Rows of an item."""
WIDE, SLIM = PIECE_TILES, PIECE_TILES // 2
"""n-tiles of an item. With a slim one half of a block's warps multiply, one of each scheduler."""
COSTS = {(WIDE, HIGH): 1.0, (WIDE, LOW): 0.61, (SLIM, HIGH): 0.626, (SLIM, LOW): 0.404}
"""What an item takes of a multiprocessor's time, to a few percent: of steps of 2,048 rows cut into
such items alone, on 16 multiprocessors of an H100.
Source: docs/measurements/2026-11-23-cuda-15.md."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The items of a launch, in the order in which blocks take them."""

    pieces: tuple[Piece, ...]
    height: int
    """Rows of a tile, HIGH or LOW."""
    tiles: int
    whole: int
    """Tiles that are one item; the others are two, of LOW rows."""

    @property
    def items(self) -> int:
        """Of the launch."""
        return 2 * self.tiles - self.whole


def launches(site: Site, device: Device) -> tuple[Launch, ...]:
    """The launches of a call of more than 32 rows."""
    rows, before = prepared(site, slabs=True)
    return (*before, _product(site, device, rows))


def _product(site: Site, device: Device, rows: Argument) -> Launch:
    plan = layout(site)
    t, k = site.ports["x"].shape
    blocks = device.multiprocessors
    found = cut(plan, t, blocks)
    stage = _stage_bytes(plan, found.height)
    stages = max(FEWEST_STAGES, min(MOST_STAGES, device.shared // stage))
    epilogue = Epilogue[site.attributes.word("epilogue").upper()]
    outputs = len(plan.widths) if epilogue is Epilogue.NONE else 1
    return Launch(
        kernel="linear_prefill",
        source="prefill.cu",
        grid=(min(found.items, blocks), 1, 1),
        threads=THREADS,
        arguments=(
            rows,
            At("packed"),
            At("scales"),
            Table(_table(found.pieces)),
            Table(strip_table(plan)),
            At("residual"),
            Addresses(tuple(f"y{i}" for i in range(outputs))),
            Int(t),
            Int(k),
            Int(len(found.pieces)),
            Int(found.whole),
        ),
        shared=stages * stage,
        defines={
            "TILE_ROWS": found.height,
            "STAGES": stages,
            "KINDS": sum(1 << kind for kind in {_kind(group) for group in plan.groups}),
            "EPILOGUE": epilogue,
        },
    )


@lru_cache(maxsize=256)
def cut(plan: Layout, rows: int, blocks: int) -> Cut:
    """The cut of a product whose busiest block is done first; of equals the widest, then the one
    with the fewest halves: each reads rows, or weights, that another reads as well.
    """
    return min(_cuts(plan, rows, blocks), key=lambda found: _longest(found, blocks))


def _cuts(plan: Layout, rows: int, blocks: int) -> Iterator[Cut]:
    """Of whole tiles; or whole rounds of them, and then halves."""
    height = LOW if rows <= LOW else HIGH
    for width in (WIDE, SLIM):
        pieces = tuple(piece for group in plan.groups for piece in group.pieces(width))
        tiles = -(-rows // height) * len(pieces)
        yield Cut(pieces, height, tiles, tiles)
        if height == HIGH:
            yield Cut(pieces, height, tiles, tiles // blocks * blocks)


def _longest(found: Cut, blocks: int) -> float:
    """What the busiest block takes, which makes every item of so many."""
    row_tiles = found.tiles // len(found.pieces)
    widths = [WIDE if piece.tiles > SLIM else SLIM for piece in found.pieces]
    tall = np.repeat([COSTS[width, found.height] for width in widths], row_tiles)
    low = np.repeat([COSTS[width, LOW] for width in widths], row_tiles)
    costs = np.concatenate([tall[: found.whole], np.repeat(low[found.whole :], 2)])
    padded = np.pad(costs, (0, -len(costs) % blocks))
    return float(padded.reshape(-1, blocks).sum(0).max())


def _stage_bytes(plan: Layout, height: int) -> int:
    """One stage, half a step of K: rows, the n-tiles of a piece of the largest kind, barriers."""
    weights = PIECE_TILES * max(plan.kinds).step_bytes // 2
    return height * 2 * SLAB + weights + BARRIER_BYTES


def _table(pieces: Sequence[Piece]) -> Array:
    """int32 [pieces, 4]: offset in units of 512 bytes, kind | n-tiles of the group << 8, n-tiles,
    first packed column.
    """
    rows = [
        (p.offset // OFFSET_UNIT, _kind(p.group) | p.group.tiles << 8, p.tiles, p.column)
        for p in pieces
    ]
    return np.array(rows, np.int32)


def _kind(group: Group) -> int:
    return NARROW if group.narrow else group.kind
