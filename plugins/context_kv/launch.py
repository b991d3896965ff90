"""context_kv on a GPU: one launch for all rows of all layers."""

from __future__ import annotations

import numpy as np

from thor_dflash.core.tensors import DType
from thor_dflash.plugins.context_kv import OP
from thor_dflash.plugins.draft_attention.launch import frequencies, refuse_heads, refuse_shapes
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
)

LAYERS = 64
"""Most layers of a call."""

TOLERANCE = 2.0**-7
"""Largest error, relative to the largest value: a key may be rounded differently in its last bf16
place, which is 2^-7 of a value just above a power of two. Values are copied."""

WARPS = 8


def refuse(site: CallSite) -> str:
    """Returns why the kernel cannot run this call, or an empty string if it can."""
    for i in range(site.attributes.integer("layers")):
        for name in (f"k{i}", f"v{i}", f"ring_k{i}", f"ring_v{i}"):
            if (dtype := site.ports[name].dtype) is not DType.BF16:
                return f"context_kv.{name} must be bfloat16 (got {dtype.value})"
        norm = site.ports[f"k_norm{i}"].dtype
        if norm not in (DType.BF16, DType.F32) or norm is not site.ports["k_norm0"].dtype:
            return f"context_kv.k_norm{i} must be all bfloat16 or all float32 (got {norm.value})"
    if (layers := site.attributes.integer("layers")) > LAYERS:
        return f"context_kv.layers must be at most {LAYERS} (got {layers})"
    return refuse_heads("context_kv", site) or refuse_shapes("context_kv", site, _shapes(site))


def _shapes(site: CallSite) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of all ports whose addresses depend on kv_heads and head_dim."""
    kv, dim = (site.attributes.integer(n) for n in ("kv_heads", "head_dim"))
    rows = site.size("k0", 0)
    wanted: dict[str, tuple[int, ...]] = {}
    for i in range(site.attributes.integer("layers")):
        ring = (kv, site.size(f"ring_k{i}", 1), dim)
        wanted |= {f"k{i}": (rows, kv * dim), f"v{i}": (rows, kv * dim), f"k_norm{i}": (dim,)}
        wanted |= {f"ring_k{i}": ring, f"ring_v{i}": ring}
    return wanted


def launches(site: CallSite, device: Device) -> tuple[Launch, ...]:
    """Returns one launch with grid x: rows, y: layers."""
    del device
    a = site.attributes
    layers, kv = a.integer("layers"), a.integer("kv_heads")
    rows = site.size("k0", 0)

    def every(stem: str) -> PointerTable:
        return PointerTable(tuple(f"{stem}{i}" for i in range(layers)))

    slots = np.array([site.size(f"ring_k{i}", 1) for i in range(layers)], np.int32)
    return (
        Launch(
            "context_kv",
            (rows, layers, 1),
            32 * min(WARPS, kv),
            (
                Pointer("length"),
                *(every(n) for n in ("k", "v", "k_norm", "next_ring_k", "next_ring_v")),
                Table(slots),
                Table(frequencies(site)),
                Int(rows),
                Int(kv),
                Real(a.real("norm_eps")),
            ),
            defines={
                "HEAD_DIM": a.integer("head_dim"),
                "ROTARY": a.integer("rotary_dim"),
                "NORM_F32": int(site.ports["k_norm0"].dtype is DType.F32),
            },
        ),
    )


KERNELS = OpKernels(
    OP,
    launches,
    refuse,
    in_place=frozenset(f"next_ring_{n}{i}" for i in range(LAYERS) for n in "kv"),
)
