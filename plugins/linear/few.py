"""Launches of a product with at most 32 rows: the block of a verify, a draft or one token."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from thor_dflash.plugins.launch import (
    Addresses,
    Argument,
    At,
    Device,
    Int,
    Launch,
    Real,
    Scratch,
    Site,
    Table,
)
from thor_dflash.plugins.linear.layout import Layout, layout
from thor_dflash.plugins.linear.partition import partition
from thor_dflash.plugins.linear.prepare import prepared
from thor_dflash.tensors import Array, DType

MOST_ROWS = 32
SQUARES_COLUMNS = 256
"""Columns of one sum of squares."""
TILE_ROWS = 16
_THREADS = 256
_WARPS = 8
_GROUP_COLUMNS = 256
_SLOTS, _SLOT = 4, 2304
_CHUNKS, _PITCH = 3, 528
_SIDE = 5120
"""sizeof(Side) in finish.cuh, rounded up."""


class Epilogue(IntEnum):
    """As EPILOGUE in finish.cuh."""

    NONE = 0
    SWIGLU = 1
    RESIDUAL = 2
    LOGITS = 3


@dataclass(frozen=True, slots=True)
class Fused:
    """What surrounds the product, and where the results go."""

    epilogue: Epilogue
    outputs: tuple[str, ...]
    folder: str = ""
    """Of linear's sources, from the room's own."""


def few_launches(site: Site, device: Device, fused: Fused) -> tuple[Launch, ...]:
    """The product; before it the prologue, unless the rows come with it (`x_normed`, which lack the
    row's 1 / rms; that is made of `x_squares` at the end).
    """
    if "x_normed" in site:
        return (_product(site, device, fused, At("x_normed"), scaled=True),)
    rows, before = prepared(site, fused.folder)
    return (*before, _product(site, device, fused, rows, scaled=False))


def _product(site: Site, device: Device, fused: Fused, rows: Argument, *, scaled: bool) -> Launch:
    plan = layout(site)
    count = site.size("x", 0)
    tiles = -(-count // TILE_ROWS)
    # Two blocks share a multiprocessor; one where 32 rows' sums take all its registers.
    cut = partition(plan, device.multiprocessors * (2 if tiles == 1 else 1))
    part = TILE_ROWS * tiles * _GROUP_COLUMNS * 4
    return Launch(
        kernel="linear",
        source=f"{fused.folder}kernel.cu",
        grid=(len(cut.blocks), 1, 1),
        threads=_THREADS,
        arguments=(
            At("packed"),
            At("scales"),
            rows,
            At("x_squares"),
            At("residual"),
            Addresses(fused.outputs),
            At("y0_squares"),
            At("y0_normed"),
            At("next_norm_weight"),
            Table(cut.item_table()),
            Table(strip_table(plan)),
            Scratch("partials", max(1, cut.parts) * part),
            Scratch("arrivals", max(1, cut.parts) * 4, zeroed=True),
            Int(cut.most_items),
            Int(len(fused.outputs)),
            Int(count),
            Int(plan.k),
            Real(site.attributes.real("norm_eps")),
            Real(_next_offset(site)),
        ),
        shared=_shared(tiles),
        defines={
            "ROW_TILES": tiles,
            "KINDS": sum(1 << kind for kind in set(plan.kinds)),
            "ROW_SCALE": int(scaled),
            "EPILOGUE": int(fused.epilogue),
            "NEXT": _next(site),
        },
    )


def _shared(tiles: int) -> int:
    weights = _WARPS * _SLOTS * (_SLOT + 8)
    rows = _CHUNKS * (TILE_ROWS * tiles * _PITCH + 16)
    return weights + rows + _WARPS * tiles * 2 * 32 * 16 + _SIDE


def _next(site: Site) -> int:
    """What is left of rows that the next call norms, as NEXT in finish.cuh."""
    if "y0_normed" not in site:
        return 0
    return 2 if site.ports["next_norm_weight"].dtype is DType.F32 else 1


def _next_offset(site: Site) -> float:
    values = site.attributes.values
    return site.attributes.real("next_norm_offset") if "next_norm_offset" in values else 0.0


def strip_table(plan: Layout) -> Array:
    """int32 [packed columns / 8, 2]: segment << 24 | column, or -1 for padding; segment's width."""
    return np.array(
        [
            (-1, 0) if s is None else (s.segment << 24 | s.column, plan.widths[s.segment])
            for s in plan.strips
        ],
        np.int32,
    )
