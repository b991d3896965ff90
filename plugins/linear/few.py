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
from thor_dflash.tensors import Array, DType

MOST_ROWS = 32
SQUARES_COLUMNS = 256
"""Columns of one sum of squares."""
TILE_ROWS = 16
_THREADS = 256
_WARPS = 8
_GROUP_COLUMNS = 256
_SLOT = 2304
_CHUNK_ROW = 512
_SIDE = 3840
"""sizeof(Side) in finish.cuh, rounded up."""


class Norm(IntEnum):
    """Prologue norm, as NORM in stage.cuh."""

    NONE = 0
    ROW = 1
    HEAD = 2


class Gate(IntEnum):
    """Prologue gate, as GATE in stage.cuh."""

    NONE = 0
    SIGMOID = 1
    SILU = 2


class Epilogue(IntEnum):
    """As EPILOGUE in finish.cuh."""

    NONE = 0
    SWIGLU = 1
    RESIDUAL = 2
    LOGITS = 3


@dataclass(frozen=True, slots=True)
class Fused:
    """What surrounds the product, and where the results go."""

    norm: Norm
    gate: Gate
    epilogue: Epilogue
    outputs: tuple[str, ...]
    head_dim: int = 0
    folder: str = ""
    """Of linear's sources, from the room's own."""


def few_launches(site: Site, device: Device, fused: Fused) -> tuple[Launch, ...]:
    """The product, after the rows' sums of squares where nobody gives them as `x_squares`."""
    squares: Argument = At("x_squares")
    before: tuple[Launch, ...] = ()
    if fused.norm is Norm.ROW and "x_squares" not in site:
        rows, columns = site.ports["x"].shape
        squares = Scratch("x_squares", squares_bytes(columns))
        before = (_squares(rows, columns, squares, fused.folder),)
    return (*before, _product(site, device, fused, squares))


def squares_bytes(columns: int) -> int:
    """Size of float32 [columns / 256 rounded up, 32]."""
    return -(-columns // SQUARES_COLUMNS) * MOST_ROWS * 4


def squares_launch(rows: int, columns: int) -> Launch:
    """`squares` float32 [columns / 256 rounded up, 32] of `x` bf16 [rows, columns].

    Each is the sum of the squares of 256 columns of a row; those of rows past the last are zero.
    """
    return _squares(rows, columns, At("squares"), "")


def _squares(rows: int, columns: int, squares: Argument, folder: str) -> Launch:
    return Launch(
        kernel="squares",
        grid=(-(-columns // SQUARES_COLUMNS), 1, 1),
        threads=_THREADS,
        arguments=(At("x"), squares, Int(rows), Int(columns)),
        source=f"{folder}squares.cu",
    )


def _product(site: Site, device: Device, fused: Fused, squares: Argument) -> Launch:
    plan = layout(site)
    rows = site.size("x", 0)
    tiles = -(-rows // TILE_ROWS)
    stages = 5 if tiles == 1 else 4
    cut = partition(plan, device.multiprocessors)
    part = TILE_ROWS * tiles * _GROUP_COLUMNS * 4
    norm = "norm_weight" in site and site.ports["norm_weight"].dtype is DType.F32
    return Launch(
        kernel="linear",
        source=f"{fused.folder}kernel.cu",
        grid=(len(cut.blocks), 1, 1),
        threads=_THREADS,
        arguments=(
            At("packed"),
            At("scales"),
            At("x"),
            squares,
            At("norm_weight"),
            At("gate"),
            At("residual"),
            Addresses(fused.outputs),
            At("y0_squares"),
            Table(cut.block_table()),
            Table(cut.item_table()),
            Table(strip_table(plan)),
            Scratch("partials", max(1, cut.parts) * part),
            Scratch("arrivals", max(1, cut.parts) * 4, zeroed=True),
            Int(len(fused.outputs)),
            Int(rows),
            Int(plan.k),
            Int(fused.head_dim),
            Real(site.attributes.real("norm_eps")),
            Real(site.attributes.real("norm_offset")),
            Int(stages),
        ),
        shared=_WARPS * stages * (_SLOT + 8) + 2 * TILE_ROWS * tiles * _CHUNK_ROW + _SIDE,
        defines={
            "ROW_TILES": tiles,
            "KINDS": sum(1 << kind for kind in set(plan.kinds)),
            "NORM": int(fused.norm),
            "NORM_F32": int(norm),
            "GATE": int(fused.gate),
            "EPILOGUE": int(fused.epilogue),
            "STAGES": stages,
        },
    )


def strip_table(plan: Layout) -> Array:
    """int32 [packed columns / 8, 2]: segment << 24 | column, or -1 for padding; segment's width."""
    return np.array(
        [
            (-1, 0) if s is None else (s.segment << 24 | s.column, plan.widths[s.segment])
            for s in plan.strips
        ],
        np.int32,
    )
