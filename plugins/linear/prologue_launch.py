"""The prologue's launch, which prepares the rows of a product: norm and gate, rounded once."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from thor_dflash.core.tensors import DType
from thor_dflash.plugins.launch import Argument, CallSite, Int, Launch, Pointer, Real, Scratch

THREADS = 256
_COLUMNS = 8 * THREADS
"""Columns of a row that a block processes at a time."""
_WHOLE_ROW = 1
"""Value of NORM for a norm over the whole row; other values are the columns of a head."""
HEADS = (8, 16, 32, 64, 128, 256)
"""Supported widths of a per-head norm: eight columns per thread, one warp at most."""

SLAB = 64
"""Columns of a slab."""


class GateKind(IntEnum):
    """Prologue gate, as in prologue.cu."""

    NONE = 0
    SIGMOID = 1
    SILU = 2


def refuse_types(site: CallSite, rows: Sequence[str]) -> str:
    """Returns why the kernels cannot take the types of these ports, which are rows, or that of the
    norm weight, or an empty string if they can.
    """
    op = site.op.name
    for name in rows:
        if name in site and (dtype := site.ports[name].dtype) is not DType.BF16:
            return f"{op}.{name} must be bfloat16 (got {dtype.value})"
    if "norm_weight" in site:
        dtype = site.ports["norm_weight"].dtype
        if dtype not in (DType.BF16, DType.F32):
            return f"{op}.norm_weight must be bfloat16 or float32 (got {dtype.value})"
    return ""


def padded(k: int) -> int:
    """Rounds a number of columns up to whole slabs."""
    return -(-k // SLAB) * SLAB


def prepared(
    site: CallSite, folder: str = "", *, slabs: bool = False
) -> tuple[Argument, tuple[Launch, ...]]:
    """Returns the product's input rows and the launch that makes them; no launch if `x` itself can
    be used.

    Args:
        folder: Path of linear's sources, relative to the operator's own folder.
        slabs: Whether the rows must be in slabs (activation_slabs.cuh), as the products'
            kernels read them; `x` never is.
    """
    a = site.attributes
    gate = GateKind[a.word("gate").upper()] if "gate" in a.values else GateKind.NONE
    if "norm_weight" not in site and gate is GateKind.NONE and not slabs:
        return Pointer("x"), ()
    t, k = site.ports["x"].shape
    norm = _norm(site)
    wide = "norm_weight" in site and site.ports["norm_weight"].dtype is DType.F32
    rows = Scratch("rows", 2 * t * padded(k))
    arguments = (Pointer("x"), Pointer("norm_weight"), Pointer("gate"), rows, Int(k))
    launch = Launch(
        kernel="linear_rows",
        source=f"{folder}prologue.cu",
        grid=(t, 1 if norm == _WHOLE_ROW else -(-k // _COLUMNS), 1),
        threads=THREADS,
        arguments=(*arguments, Real(a.real("norm_eps")), Real(a.real("norm_offset"))),
        defines={
            "WEIGHT_FLOAT": int(wide),
            "SLABS": int(slabs),
            "LONG": int(slabs and t * padded(k) > 2**31),
            "GATE": int(gate),
            "NORM": norm,
        },
    )
    return rows, (launch,)


def _norm(site: CallSite) -> int:
    """As NORM in prologue.cu."""
    if "norm_weight" not in site:
        return 0
    values = site.attributes.values
    head = site.attributes.integer("head_dim") if "head_dim" in values else 0
    return _WHOLE_ROW if head in (0, site.size("x", 1)) else head
