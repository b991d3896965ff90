"""rms_norm on a GPU: one block per row."""

from __future__ import annotations

from thor_dflash.core.tensors import DType
from thor_dflash.plugins.launch import CallSite, Device, Int, Launch, OpKernels, Pointer, Real
from thor_dflash.plugins.rms_norm import OP

TOLERANCE = 2.0**-7
"""As in linear: the result and the reference are each rounded once, sums are float32."""

THREADS = 256
UNIT = 8
"""Columns that a thread processes at a time."""


def refuse(site: CallSite) -> str:
    """Returns why the kernel cannot run this call, or an empty string if it can."""
    columns = site.size("x", 1)
    if (dtype := site.ports["x"].dtype) is not DType.BF16:
        return f"rms_norm.x must be bfloat16 (got {dtype.value})"
    if (dtype := site.ports["weight"].dtype) not in (DType.BF16, DType.F32):
        return f"rms_norm.weight must be bfloat16 or float32 (got {dtype.value})"
    return f"rms_norm.x must have a multiple of {UNIT} columns (got {columns})" * bool(
        columns % UNIT
    )


def launches(site: CallSite, device: Device) -> tuple[Launch, ...]:
    """Returns one launch."""
    del device
    (rows, columns), a = site.ports["x"].shape, site.attributes
    return (
        Launch(
            "rms_norm",
            (rows, 1, 1),
            THREADS,
            (
                *map(Pointer, ("x", "weight", "y")),
                Int(columns),
                Real(a.real("eps")),
                Real(a.real("offset")),
            ),
            defines={"WEIGHT_FLOAT": int(site.ports["weight"].dtype is DType.F32)},
        ),
    )


KERNELS = OpKernels(OP, launches, refuse)
