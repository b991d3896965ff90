"""image_positions on a GPU: one block per patch."""

from __future__ import annotations

from thor_dflash.core.tensors import DType
from thor_dflash.plugins.image_positions import OP
from thor_dflash.plugins.launch import CallSite, Device, Int, Launch, OpKernels, Pointer

TOLERANCE = 2.0**-7
"""As in linear: the result and the reference are each rounded once, sums are float32."""

THREADS = 128
UNIT = 8
"""Columns that a thread computes."""


def refuse(site: CallSite) -> str:
    """Returns why the kernel cannot run this call, or an empty string if it can."""
    columns = site.size("table", 1)
    if (dtype := site.ports["table"].dtype) is not DType.BF16:
        return f"image_positions.table must be bfloat16 (got {dtype.value})"
    if columns % UNIT:
        return f"image_positions.table must have a multiple of {UNIT} columns (got {columns})"
    return ""


def launches(site: CallSite, device: Device) -> tuple[Launch, ...]:
    """Returns one launch."""
    del device
    patches, columns = site.ports["y"].shape
    grid = patches, -(-columns // (UNIT * THREADS)), 1
    return (
        Launch(
            "image_positions",
            grid,
            THREADS,
            (*map(Pointer, ("table", "taps", "weights", "y")), Int(columns)),
        ),
    )


KERNELS = OpKernels(OP, launches, refuse)
