"""layer_norm on a GPU: one block per row."""

from __future__ import annotations

from thor_dflash.core.tensors import DType
from thor_dflash.plugins.launch import CallSite, Device, Int, Launch, OpKernels, Pointer, Real
from thor_dflash.plugins.layer_norm import OP

TOLERANCE = 2.0**-7
"""As in linear: the result and the reference are each rounded once, sums are float32."""

THREADS = 128
UNIT = 8
"""Columns that a thread processes at a time."""
MOST_COLUMNS = 4 * UNIT * THREADS
"""A thread keeps at most four units in registers."""


def refuse(site: CallSite) -> str:
    """Returns why the kernel cannot run this call, or an empty string if it can."""
    columns = site.size("x", 1)
    if (dtype := site.ports["x"].dtype) is not DType.BF16:
        return f"layer_norm.x must be bfloat16 (got {dtype.value})"
    if (dtype := site.ports["weight"].dtype) not in (DType.BF16, DType.F32):
        return f"layer_norm.weight must be bfloat16 or float32 (got {dtype.value})"
    if columns % UNIT or columns > MOST_COLUMNS:
        rule = f"a multiple of {UNIT} columns, at most {MOST_COLUMNS}"
        return f"layer_norm.x must have {rule} (got {columns})"
    return ""


def launches(site: CallSite, device: Device) -> tuple[Launch, ...]:
    """Returns one launch. Folded rows lie in memory as the rows do, so `fold` costs nothing."""
    del device
    rows, columns = site.ports["x"].shape
    return (
        Launch(
            "layer_norm",
            (rows, 1, 1),
            THREADS,
            (
                *map(Pointer, ("x", "weight", "bias", "y")),
                Int(columns),
                Real(site.attributes.real("eps")),
            ),
            defines={"WEIGHT_FLOAT": int(site.ports["weight"].dtype is DType.F32)},
        ),
    )


KERNELS = OpKernels(OP, launches, refuse)
