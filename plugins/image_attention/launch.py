"""image_attention on a GPU: rows are turned and laid out by head, then 64 attend per block."""

from __future__ import annotations

from thor_dflash.core.tensors import DType
from thor_dflash.plugins.image_attention import OP
from thor_dflash.plugins.launch import (
    CallSite,
    Device,
    Int,
    Launch,
    OpKernels,
    Pointer,
    Real,
    Scratch,
    Table,
)
from thor_dflash.plugins.numpy_math import inverse_frequency

TOLERANCE = 1.2e-2
"""As in verify_attention with bf16 caches: the weights are rounded to bf16 before the sum."""

THREADS = 128
TILE = 64
"""Patches of a block's queries, and of a step over keys and values."""
UNIT = 16
"""A head's columns are padded to a multiple of it, for the matrix products."""
DIMS = range(8, 129, 8)
"""Supported head dimensions."""
LOG2_E = 1.4426950408889634


def refuse(site: CallSite) -> str:
    """Returns why the kernels cannot run this call, or an empty string if they can."""
    a = site.attributes
    heads, dim = a.integer("heads"), a.integer("head_dim")
    if (dtype := site.ports["qkv"].dtype) is not DType.BF16:
        return f"image_attention.qkv must be bfloat16 (got {dtype.value})"
    if dim not in DIMS:
        return f"image_attention.head_dim must be a multiple of 8, at most 128 (got {dim})"
    if (got := site.size("qkv", 1)) != 3 * heads * dim:
        return f"image_attention.qkv must have {3 * heads * dim} columns (got {got})"
    return ""


def pitch(dim: int) -> int:
    """Columns of a head's row in scratch memory."""
    return -(-dim // UNIT) * UNIT


def launches(site: CallSite, device: Device) -> tuple[Launch, ...]:
    """Returns the two launches."""
    del device
    a, patches = site.attributes, site.size("qkv", 0)
    heads, dim = a.integer("heads"), a.integer("head_dim")
    padded = -(-patches // TILE) * TILE
    turned = Scratch("turned", 3 * 2 * heads * padded * pitch(dim))
    defines = {"DIM": dim, "PITCH": pitch(dim)}
    places = map(Pointer, ("row", "column", "count"))
    sizes = Int(patches), Int(padded)
    rows = Launch(
        "turn_patches",
        (padded, 1, 1),
        THREADS,
        (
            Pointer("qkv"),
            *places,
            Table(inverse_frequency(dim // 2, a.real("rope_theta"))),
            turned,
            *sizes,
            Int(heads),
        ),
        defines=defines,
    )
    # Two tiles of keys and of values, with 16 bytes more per row: see kernel.cu.
    shared = 2 * 2 * TILE * (2 * pitch(dim) + 16)
    attend = Launch(
        "attend_patches",
        (padded // TILE, heads, 1),
        THREADS,
        (turned, Pointer("count"), Pointer("o"), *sizes, Real(LOG2_E * dim**-0.5)),
        shared=shared,
        defines=defines,
    )
    return rows, attend


KERNELS = OpKernels(OP, launches, refuse)
