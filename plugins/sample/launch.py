"""sample on a GPU: one launch, a cluster of blocks for each row."""

from __future__ import annotations

from thor_dflash.plugins.launch import CallSite, Device, Int, Launch, OpKernels, Pointer
from thor_dflash.plugins.sample import OP

NARROW = 8192
"""Most logits of a row that one block takes."""
NARROW_THREADS, THREADS = 256, 512
BLOCKS = 5
"""Blocks of a cluster for longer rows: three clusters fit into any 16 neighbouring multiprocessors,
so that an H100 runs 16 rows at once. Four could not hold a row of 248,320."""
MOST_LOGITS = BLOCKS * 55_000
"""What the shared memory of a cluster holds."""

TOLERANCE = 0.0
"""The results are integers, and the arithmetic that chooses them has one definition."""

_INPUTS = (
    *("logits", "id_map", "mask", "length", "seed", "temperature", "top_k", "top_p"),
    "min_log_p",
)
_OUTPUTS = ("choice", "last")
_REJECTION = ("tokens", "drawn", "candidates", "scores")
MOST_CANDIDATES = 32
"""One lane each."""


def refuse(site: CallSite) -> str:
    """Returns why the kernel cannot run this call, or an empty string if it can."""
    limit = _limit(site)
    if not 1 <= limit <= MOST_LOGITS:
        return f"sample.logits must be 1 to {MOST_LOGITS} logits a row (got {limit})"
    words = -(-limit // 32)
    if "mask" in site and site.size("mask", 1) < words:
        return f"sample.mask must be {words} words a row (got {site.size('mask', 1)})"
    given = [port for port in _REJECTION if port in site]
    if len(given) not in (0, len(_REJECTION)):
        return f"sample must have all of {', '.join(_REJECTION)} or none (got {', '.join(given)})"
    if given and "id_map" in site:
        return "sample.id_map must be left out with candidates (got both)"
    if given and not 1 <= (count := site.size("candidates", 1)) <= MOST_CANDIDATES:
        return f"sample.candidates must be 1 to {MOST_CANDIDATES} a row (got {count})"
    return ""


def launches(site: CallSite, device: Device) -> tuple[Launch, ...]:
    """Returns one launch."""
    del device
    rows, width = site.ports["logits"].shape
    limit = _limit(site)
    blocks, threads = (1, NARROW_THREADS) if limit <= NARROW else (BLOCKS, THREADS)
    part = -(-limit // (4 * blocks)) * 4
    more = _REJECTION if "candidates" in site else ()
    count = {"CANDIDATES": site.size("candidates", 1)} if more else {}
    return (
        Launch(
            kernel="sample_rows",
            grid=(blocks, rows, 1),
            threads=threads,
            arguments=(
                *(Pointer(port) for port in (*_INPUTS, *more, *_OUTPUTS)),
                Int(width),
                Int(limit),
                Int(site.size("mask", 1) if "mask" in site else 0),
                Int(site.attributes.integer("first")),
            ),
            shared=4 * part,
            defines={
                "THREADS": threads,
                "PART": part,
                "BLOCKS": blocks,
                "MAPPED": int("id_map" in site),
                **count,
            },
            cluster=blocks,
        ),
    )


def _limit(site: CallSite) -> int:
    """Returns the number of logits of a row that may be drawn."""
    width = site.size("logits", 1)
    return min(site.attributes.integer("vocab") or width, width)


KERNELS = OpKernels(OP, launches, refuse, optional=frozenset({"last"}))
