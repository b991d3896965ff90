"""Launches of the standard nodes. Arguments name ports, which the caller binds to memory.

Ports, all in device memory and 16-byte aligned unless they are smaller:
    embed    table bf16 [V, H], ids int32 [>= count] -> rows bf16 [T, H]; with next_norm_weight bf16
             or float32 [H] also -> y0_slabs, y0_squares, as linear writes them
    concat   x0, x1, ... bf16 [T, W_i] -> y bf16 [T, sum W]
    compose  last int32 [1], forced int32 [R], best int32 [R] -> tokens int32 [R]
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from thor_dflash.core.tensors import DType
from thor_dflash.plugins.launch import (
    CallSite,
    Device,
    Int,
    Launch,
    OpKernels,
    Pointer,
    PointerTable,
    Real,
    Table,
    always,
)
from thor_dflash.plugins.linear.decode_launch import SQUARES_ROWS
from thor_dflash.plugins.standard.nodes import COMPOSE, CONCAT, EMBED

WARPS = 8
THREADS = 32 * WARPS
UNIT = 8
"""bf16 elements in the 16 bytes that a lane copies."""
SLICE = 32 * UNIT
"""Columns that a warp copies."""


def refuse_embed(table: DType, hidden: int) -> str:
    """Returns why the kernel cannot run such a gather, or an empty string if it can."""
    if table is not DType.BF16:
        return f"embed.table must be bfloat16 (got {table.value})"
    return f"embed.hidden must be a multiple of {UNIT} (got {hidden})" if hidden % UNIT else ""


def embed(
    rows: int,
    vocabulary: int,
    hidden: int,
    *,
    count: int | None = None,
    filler: int = 0,
    norm: DType | None = None,
    offset: float = 0.0,
) -> Launch:
    """Returns the launch that gathers the embedding rows of `ids`. From row `count` on the id is
    `filler`, so that the drafter's [last, mask, mask, ...] needs no node of its own. An id outside
    the table gives a row of NaN.

    With `norm`, the type of a norm's weight, it also writes the input of the product after that
    norm; then there may be at most SQUARES_ROWS rows, of whole slabs.

    `refuse_embed` must return an empty string.
    """
    slices = -(-hidden // SLICE)
    return Launch(
        "embed",
        (rows if norm is None else SQUARES_ROWS, -(-slices // WARPS), 1),
        THREADS,
        (
            *map(Pointer, ("table", "ids", "rows", "y0_slabs", "y0_squares", "next_norm_weight")),
            Int(vocabulary),
            Int(hidden),
            Int(rows),
            Int(rows if count is None else count),
            Int(filler),
            Real(offset),
        ),
        source="embed.cu",
        defines={"NEXT": 0 if norm is None else 2 if norm is DType.F32 else 1},
    )


def refuse_concat(widths: Sequence[int]) -> str:
    """Returns why the kernel cannot take sources of these widths, or an empty string if it can."""
    odd = [width for width in widths if width % UNIT]
    return f"concat.width must be a multiple of {UNIT} (got {odd[0]})" if odd else ""


def concat(rows: int, widths: Sequence[int]) -> Launch:
    """Returns the launch that puts rows of `x0`, `x1`, ... side by side. `refuse_concat` must
    return an empty string.
    """
    units = np.array(widths, np.int32) // UNIT
    starts = np.concatenate([[0], np.cumsum(units)[:-1]]).astype(np.int32)
    return Launch(
        "concat",
        (rows, len(widths), 1),
        THREADS,
        (
            PointerTable(tuple(f"x{i}" for i in range(len(widths)))),
            Table(units),
            Table(starts),
            Pointer("y"),
            Int(int(units.sum())),
        ),
    )


def compose(rows: int) -> Launch:
    """tokens[0] = last; tokens[i + 1] = forced[i] if forced[i] >= 0 else max(best[i + 1], 0).

    `rows` is at most 1024: one thread per row.
    """
    threads = 32 * -(-rows // 32)
    ports = ("last", "forced", "best", "tokens")
    return Launch("compose", (1, 1, 1), threads, (*(Pointer(name) for name in ports), Int(rows)))


# ---- the same, by call ----------------------------------------------------------------------


def _embed(site: CallSite, device: Device) -> tuple[Launch, ...]:
    (rows, hidden), vocab = site.ports["rows"].shape, site.size("table", 0)
    a, weight = site.attributes, site.ports.get("next_norm_weight")
    count, mask = (1, a.integer("mask")) if a.integer("mask") >= 0 else (rows, 0)
    norm, offset = (weight.dtype, a.real("next_norm_offset")) if weight else (None, 0.0)
    one = embed(rows, vocab, hidden, count=count, filler=mask, norm=norm, offset=offset)
    return (one,)


def _refuse_embed(site: CallSite) -> str:
    return refuse_embed(site.ports["table"].dtype, site.size("rows", 1))


def _widths(site: CallSite) -> list[int]:
    count = sum(port.startswith("x") for port in site.ports)
    return [site.size(f"x{i}", 1) for i in range(count)]


def _concat(site: CallSite, device: Device) -> tuple[Launch, ...]:
    return (concat(site.size("y", 0), _widths(site)),)


def _refuse_concat(site: CallSite) -> str:
    return refuse_concat(_widths(site))


def _compose(site: CallSite, device: Device) -> tuple[Launch, ...]:
    return (compose(site.size("tokens", 0)),)


KERNELS = (
    OpKernels(EMBED, _embed, _refuse_embed, fuses_norm=always),
    OpKernels(CONCAT, _concat, _refuse_concat),
    OpKernels(COMPOSE, _compose),
)
