"""selector on a GPU: the candidates of each row, then their scores and the walk."""

from __future__ import annotations

from thor_dflash.core.tensors import DType
from thor_dflash.plugins.head.argmax_launch import DEFINES, slices
from thor_dflash.plugins.launch import (
    CallSite,
    Device,
    Int,
    Launch,
    OpKernels,
    Pointer,
    Real,
    Scratch,
)
from thor_dflash.plugins.selector import LAW, OP

TOLERANCE = 2e-6
"""Of scores, float32 sums. Ids must be equal: tests keep scores apart by more than sums differ."""

THREADS = DEFINES["SLICE_THREADS"]
MOST_ROWS = 32
MOST_CANDIDATES = 32
"""One lane each."""
MOST_SLICES = 32
"""Slices of a row, one lane each."""
EDGES = ("hidden", "predecessors", "successors")
COLUMNS = 8, 512
"""Columns of a codebook must be a multiple of the first, at most the second."""


def refuse(site: CallSite) -> str:
    """Returns why the kernels cannot run this call, or an empty string if they can."""
    rows, width = site.ports["logits"].shape
    if not 2 <= rows <= MOST_ROWS:
        return f"selector.logits must be 2 to {MOST_ROWS} rows (got {rows})"
    if slices(width) > MOST_SLICES:
        most = MOST_SLICES * DEFINES["SLICE"]
        return f"selector.logits must have at most {most} columns (got {width})"
    if not 1 <= (top_k := site.attributes.integer("top_k")) <= MOST_CANDIDATES:
        return f"selector.top_k must be 1 to {MOST_CANDIDATES} (got {top_k})"
    if site.attributes.integer("rejection") and "seed" not in site:
        return "selector.seed must be given with rejection (got none)"
    given = [name for name in EDGES if name in site]
    if len(given) not in (0, len(EDGES)):
        return f"selector must have all of {', '.join(EDGES)} or none (got {', '.join(given)})"
    return _refuse_edges(site) if given else ""


def _refuse_edges(site: CallSite) -> str:
    vocab, rank = site.ports["successors"].shape
    for name in EDGES:
        if (dtype := site.ports[name].dtype) is not DType.BF16:
            return f"selector.{name} must be bfloat16 (got {dtype.value})"
    unit, most = COLUMNS
    if rank % unit or not 0 < rank <= most:
        rule = f"a multiple of {unit} up to {most} columns"
        return f"selector.successors must be {rule} (got {rank})"
    if (got := site.ports["predecessors"].shape) != (vocab, rank):
        return f"selector.predecessors must be as successors, {vocab, rank} (got {got})"
    return ""


def launches(site: CallSite, device: Device) -> tuple[Launch, ...]:
    """Returns two launches: candidates by slices of rows, then scores by row, and the walk."""
    del device
    a, (rows, width) = site.attributes, site.ports["logits"].shape
    limit, top_k = min(a.integer("vocab") or width, width), a.integer("top_k")
    rank = site.size("successors", 1) if "successors" in site else 0
    drafts, count = rows - 1, slices(limit)
    ids, unary = (Scratch(name, 4 * drafts * top_k) for name in ("ids", "unary"))
    drawn = ("length", "seed", "temperature")
    law = LAW if a.integer("rejection") else ()
    return (
        Launch(
            "selector_candidates",
            (count, drafts, 1),
            THREADS,
            (
                Pointer("logits"),
                Pointer("id_map"),
                ids,
                unary,
                Scratch("found", 8 * drafts * count * top_k),
                Scratch("row_arrivals", 4 * drafts, zeroed=True),
                Int(width),
                Int(limit),
                Real(a.real("multiplier")),
                Real(a.real("softcap")),
            ),
            source="candidates.cu",
            defines={**DEFINES, "TOP_K": top_k},
        ),
        Launch(
            "selector_walk",
            (drafts, 1, 1),
            THREADS,
            (
                ids,
                unary,
                *(Pointer(name) for name in (*EDGES, "last", "forced", *drawn, "tokens", *law)),
                Scratch("scores", 4 * drafts * top_k**2),
                Scratch("walk_arrivals", 4, zeroed=True),
                Int(rows),
            ),
            shared=4 * max(2 * top_k * (rank + 4), drafts * top_k**2),
            source="walk.cu",
            defines={
                **DEFINES,
                "TOP_K": top_k,
                "RANK": rank,
                "DRAWN": int("seed" in site),
                **({"REJECTION": 1} if law else {}),
            },
        ),
    )


KERNELS = OpKernels(OP, launches, refuse)
