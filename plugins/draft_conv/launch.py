"""draft_conv on a GPU: one launch, which can also prepare the rows of the next product."""

from __future__ import annotations

from thor_dflash.core.tensors import DType
from thor_dflash.plugins.draft_conv import OP
from thor_dflash.plugins.launch import (
    CallSite,
    Device,
    Int,
    Launch,
    OpKernels,
    Pointer,
    Real,
    Shaped,
    always,
)
from thor_dflash.plugins.linear.decode_launch import SQUARES_ROWS
from thor_dflash.plugins.linear.prologue_launch import refuse_types

TOLERANCE = 2.0**-7
"""As in linear: the result and the reference are each rounded once, sums are float32."""

THREADS = 256
UNIT = 8
"""Columns that a thread computes."""
MOST_TAPS = 4


def refuse(site: CallSite) -> str:
    """Returns why the kernel cannot run this call, or an empty string if it can."""
    return _refuse_types(site) or _refuse_sizes(site)


def _refuse_types(site: CallSite) -> str:
    if why := refuse_types(site, ("x", "dynamic", "residual")):
        return why
    if (dtype := site.ports["base"].dtype) not in (DType.BF16, DType.F32):
        return f"draft_conv.base must be bfloat16 or float32 (got {dtype.value})"
    return ""


def _refuse_sizes(site: CallSite) -> str:
    a, (rows, hidden) = site.attributes, site.ports["x"].shape
    taps, group = a.integer("taps"), a.integer("group")
    if rows > SQUARES_ROWS:
        return f"draft_conv.x must be at most {SQUARES_ROWS} rows (got {rows})"
    if not 1 <= taps <= MOST_TAPS:
        return f"draft_conv.taps must be 1 to {MOST_TAPS} (got {taps})"
    if group % UNIT or hidden % group:
        rule = f"a multiple of {UNIT} that divides the {hidden} columns of x"
        return f"draft_conv.group must be {rule} (got {group})"
    wanted = {"dynamic": (rows, 2 * taps * (hidden // group)), "base": (2, taps, hidden)}
    for name, shape in wanted.items():
        if (got := site.ports[name].shape) != shape:
            return f"draft_conv.{name} must be {list(shape)}, by taps and group (got {list(got)})"
    return ""


def _kind(weight: Shaped | None) -> int:
    """0 without a weight, 2 if it is float32, else 1."""
    return 0 if weight is None else 2 if weight.dtype is DType.F32 else 1


def launches(site: CallSite, device: Device) -> tuple[Launch, ...]:
    """Returns one launch. It also writes its rows to `y0_slabs`, times the next norm's weight if
    the call has one, and then `y0_squares`.
    """
    del device
    a, (rows, hidden) = site.attributes, site.ports["x"].shape
    following = site.ports.get("next_norm_weight")
    inputs = ("x", "norm_weight", "dynamic", "base", "residual")
    return (
        Launch(
            "draft_conv",
            (SQUARES_ROWS if "y0_squares" in site else rows, -(-hidden // (UNIT * THREADS)), 1),
            THREADS,
            (
                *(Pointer(name) for name in (*inputs, "y", "y0_slabs", "y0_squares")),
                Pointer("next_norm_weight"),
                Int(rows),
                Int(hidden),
                Int(a.integer("group")),
                Int(a.integer("side")),
                Real(a.real("norm_eps")),
                Real(a.real("norm_offset")),
                Real(a.real("next_norm_offset") if following else 0.0),
            ),
            defines={
                "TAPS": a.integer("taps"),
                "NORM": _kind(site.ports.get("norm_weight")),
                "BASE_FLOAT": int(site.ports["base"].dtype is DType.F32),
                "NEXT": 0 if "y0_slabs" not in site else _kind(following) or 3,
            },
        ),
    )


KERNELS = OpKernels(OP, launches, refuse, writes_slabs=always, fuses_norm=always)
