"""draft_attention on a GPU: one launch, which splits the context over blocks and merges them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins.draft_attention import OP
from thor_dflash.plugins.launch import (
    ActiveClusters,
    CallSite,
    Choice,
    Device,
    Int,
    Launch,
    OpKernels,
    Pointer,
    Real,
    Scratch,
    Table,
    always,
)
from thor_dflash.plugins.linear.prologue_launch import SLAB
from thor_dflash.plugins.numpy_math import inverse_frequency

TOLERANCE = 2.0**-6
"""Largest error, relative to the largest value of the output.

Queries, keys and softmax weights are rounded to bf16 (by at most 2^-8 of each) before the products,
and so are the output and the result of each stretch of the context. An element of a query that is
rounded differently than in the reference changes its share of a score by up to 2^-7.
"""

ROW_BYTES = 2
BLOCK_ROWS = 32
"""Query rows of a block."""
TILE = 64
"""Positions of a stage."""
GROUPS = 4
"""Groups of 16 positions of a tile, one for each pair of warps."""
THREADS = 256
STRETCHES = 8
"""Most stretches of the context: a thread has registers for each."""
HEAD_DIMS = (16, 32, 64, 128, 256)


def refuse(site: CallSite) -> str:
    """Returns why the kernel cannot run this call, or an empty string if it can."""
    if why := _refuse_types(site) or refuse_heads("draft_attention", site):
        return why
    heads, kv, dim = (site.attributes.integer(n) for n in ("heads", "kv_heads", "head_dim"))
    if (rows := site.size("q", 0)) > BLOCK_ROWS:
        return f"draft_attention.q must be at most {BLOCK_ROWS} rows (got {rows})"
    if "y0_slabs" in site and heads * dim % SLAB:
        rule = f"of rows whose width is a multiple of {SLAB}"
        return f"draft_attention.y0_slabs must be {rule} (got {heads * dim})"
    norm, keys, ring = (dim,), (rows, kv * dim), (kv, site.size("ring_k", 1), dim)
    wanted = {"q": (rows, heads * dim), "k": keys, "v": keys, "q_norm": norm, "k_norm": norm}
    return refuse_shapes("draft_attention", site, {**wanted, "ring_k": ring, "ring_v": ring})


def _refuse_types(site: CallSite) -> str:
    for name in ("q", "k", "v", "ring_k", "ring_v"):
        if (dtype := site.ports[name].dtype) is not DType.BF16:
            return f"draft_attention.{name} must be bfloat16 (got {dtype.value})"
    for name in ("q_norm", "k_norm"):
        if (dtype := site.ports[name].dtype) not in (DType.BF16, DType.F32):
            return f"draft_attention.{name} must be bfloat16 or float32 (got {dtype.value})"
    if site.ports["q_norm"].dtype is not site.ports["k_norm"].dtype:
        return "draft_attention.k_norm must be of q_norm's type (got another)"
    return ""


def refuse_shapes(op: str, site: CallSite, wanted: Mapping[str, tuple[int, ...]]) -> str:
    """The same for shapes that the attributes decide, shared with context_kv: kernels compute
    addresses from the attributes.
    """
    for name, shape in wanted.items():
        if (got := site.ports[name].shape) != shape:
            rule = f"{list(shape)}, by its heads and head_dim"
            return f"{op}.{name} must be {rule} (got {list(got)})"
    return ""


def refuse_heads(op: str, site: CallSite) -> str:
    """The same for head_dim, rotary_dim and head counts, shared with context_kv."""
    a = site.attributes
    dim, rotary = a.integer("head_dim"), a.integer("rotary_dim")
    if dim not in HEAD_DIMS:
        return f"{op}.head_dim must be one of {HEAD_DIMS} (got {dim})"
    if rotary % 4 or not 0 < rotary <= dim:
        return f"{op}.rotary_dim must be a multiple of 4 up to head_dim (got {rotary})"
    heads = a.values.get("heads")
    if heads is not None and a.integer("heads") % a.integer("kv_heads"):
        return f"{op}.heads must be a multiple of kv_heads (got {heads})"
    return ""


def frequencies(site: CallSite) -> Array:
    """Returns the rotation of every pair, float32 [head_dim / 2], radians per position; 0 for pairs
    that are not rotated.
    """
    a = site.attributes
    out = np.zeros(a.integer("head_dim") // 2, np.float32)
    rotary = a.integer("rotary_dim")
    out[: rotary // 2] = inverse_frequency(rotary, a.real("rope_theta"))
    return out


def stages(dim: int) -> int:
    """Returns the number of stages, each a tile of keys and values."""
    return 3 if dim <= 128 else 2


def shared_bytes(dim: int) -> int:
    """Returns the dynamic shared memory, bytes: the queries, and the stages or, after the loop, the
    groups' sums.
    """
    tiles = stages(dim) * 2 * TILE * dim * ROW_BYTES
    merge = GROUPS * BLOCK_ROWS * (dim + 8) * 4
    return BLOCK_ROWS * dim * ROW_BYTES + max(tiles, merge)


def launches(site: CallSite, device: Device) -> tuple[Launch, ...]:
    """Returns one launch with grid x: stretches of the context, y: key/value heads times blocks of
    their rows. It also writes its rows to `y0_slabs` if the call has this port.
    """
    a = site.attributes
    heads, kv, dim = (a.integer(n) for n in ("heads", "kv_heads", "head_dim"))
    rows, owners = site.size("q", 0), _owners(site)
    splits = (device.choice(site) or _rule(site, device))["splits"]
    parts = owners * splits * BLOCK_ROWS
    ports = ("q", "k", "v", "q_norm", "k_norm", "length", "window", "first", "ring_k", "ring_v")
    return (
        Launch(
            "draft_attention",
            (splits, owners, 1),
            THREADS,
            (
                *(Pointer(name) for name in (*ports, "o", "y0_slabs")),
                Table(frequencies(site)),
                Scratch("means", parts * dim * 2),
                Scratch("facts", parts * 8),
                Scratch("arrived", owners * 4, zeroed=True),
                Int(rows),
                Int(heads),
                Int(kv),
                Int(site.size("ring_k", 1)),
                Int(a.integer("causal")),
                Real(a.real("norm_eps")),
            ),
            shared=shared_bytes(dim),
            defines={
                "HEAD_DIM": dim,
                "THREADS": THREADS,
                "GROUPS": GROUPS,
                "BLOCK_ROWS": BLOCK_ROWS,
                "TILE": TILE,
                "STAGES": stages(dim),
                "STRETCHES": STRETCHES,
                "ROTARY": a.integer("rotary_dim"),
                "NORM_F32": int(site.ports["q_norm"].dtype is DType.F32),
            },
        ),
    )


def _owners(site: CallSite) -> int:
    """Blocks that share a stretch of the context: heads times blocks of their rows."""
    heads, kv = (site.attributes.integer(n) for n in ("heads", "kv_heads"))
    here = BLOCK_ROWS // (16 if site.size("q", 0) <= 16 else 32)
    return kv * -(-heads // kv // here)


def _rule(site: CallSite, device: Device) -> Choice:
    """The fewest stretches with the least time, in stretches per multiprocessor and round."""

    def cost(splits: int) -> float:
        return -(-_owners(site) * splits // device.multiprocessors) / splits

    return {"splits": min(range(2, STRETCHES + 1), key=cost)}


def candidates(site: CallSite, device: Device, active: ActiveClusters | None) -> tuple[Choice, ...]:
    """Returns the `Candidates` of a call: stretches of the context."""
    rule = _rule(site, device)
    every = ({"splits": count} for count in (2, 3, 4, 5, 6, STRETCHES))
    return (rule, *(choice for choice in every if choice != rule))


KERNELS = OpKernels(OP, launches, refuse, candidates, writes_slabs=always)
