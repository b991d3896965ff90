"""image_embed on a GPU: one block per token."""

from __future__ import annotations

from thor_dflash.core.tensors import DType
from thor_dflash.plugins.image_embed import OP
from thor_dflash.plugins.launch import CallSite, Device, Int, Launch, OpKernels, Pointer

TOLERANCE = 0.0
"""Rows are copied."""

THREADS = 128
UNIT = 8
"""Columns that a thread copies."""


def refuse(site: CallSite) -> str:
    """Returns why the kernel cannot run this call, or an empty string if it can."""
    for port in ("x", "image"):
        if (dtype := site.ports[port].dtype) is not DType.BF16:
            return f"image_embed.{port} must be bfloat16 (got {dtype.value})"
    columns = site.size("x", 1)
    if columns % UNIT:
        return f"image_embed.x must have a multiple of {UNIT} columns (got {columns})"
    return ""


def launches(site: CallSite, device: Device) -> tuple[Launch, ...]:
    """Returns one launch."""
    del device
    rows, columns = site.ports["x"].shape
    grid = rows, -(-columns // (UNIT * THREADS)), 1
    return (
        Launch(
            "image_embed", grid, THREADS, (*map(Pointer, ("x", "ids", "image", "y")), Int(columns))
        ),
    )


KERNELS = OpKernels(OP, launches, refuse)
