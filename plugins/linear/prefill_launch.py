"""linear for more than 32 rows: the prologue's rows first, then tiles bound by the matrix units.

2 T N K FLOP against N K (9/16, 1 or 2) + 2 T (K + N) bytes: beyond T = 200 the products decide.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def launches(site: Site, device: Device) -> tuple[Launch, ...]:
    """The launches of a call of more than 32 rows."""
    rows, before = prepared(site, slabs=True)
    return (*before, _product(site, device, rows))


def _product(site: Site, device: Device, rows: Argument) -> Launch:
    plan = layout(site)
    t, k = site.ports["x"].shape
    tile_rows = 64 if t <= 64 else 128
    pieces = _pieces(plan)
    tiles = -(-t // tile_rows) * len(pieces)
    stage = _stage_bytes(plan, tile_rows)
    stages = max(FEWEST_STAGES, min(MOST_STAGES, device.shared // stage))
    blocks = device.multiprocessors
    whole = _whole(tiles, blocks) if tile_rows == 128 else tiles
    epilogue = Epilogue[site.attributes.word("epilogue").upper()]
    outputs = len(plan.widths) if epilogue is Epilogue.NONE else 1
    return Launch(
        kernel="linear_prefill",
        source="prefill.cu",
        grid=(min(2 * tiles - whole, blocks), 1, 1),
        threads=THREADS,
        arguments=(
            rows,
            At("packed"),
            At("scales"),
            Table(_table(pieces)),
            Table(strip_table(plan)),
            At("residual"),
            Addresses(tuple(f"y{i}" for i in range(outputs))),
            Int(t),
            Int(k),
            Int(len(pieces)),
            Int(whole),
        ),
        shared=stages * stage,
        defines={
            "TILE_ROWS": tile_rows,
            "STAGES": stages,
            "KINDS": sum(1 << kind for kind in {_kind(group) for group in plan.groups}),
            "EPILOGUE": epilogue,
        },
    )


def _whole(tiles: int, blocks: int) -> int:
    """Tiles that are done as one: what is left after full rounds is cut in two if that fits."""
    left = tiles % blocks
    return tiles - left if 2 * left <= blocks else tiles


def _stage_bytes(plan: Layout, tile_rows: int) -> int:
    """One stage, half a step of K: rows, the n-tiles of a piece of the largest kind, barriers."""
    weights = PIECE_TILES * max(plan.kinds).step_bytes // 2
    return tile_rows * 2 * SLAB + weights + BARRIER_BYTES


def _pieces(plan: Layout) -> list[Piece]:
    return [piece for group in plan.groups for piece in group.pieces(PIECE_TILES)]


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
