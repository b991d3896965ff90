"""accept on a GPU: one launch from logits to record."""

from __future__ import annotations

from thor_dflash.plugins.accept import OP
from thor_dflash.plugins.head.argmax_launch import DEFINES, THREADS, slices
from thor_dflash.plugins.launch import CallSite, Device, Int, Launch, OpKernels, Pointer, Scratch

MOST_ROWS = 32
"""The lanes of a warp: one lane decides one row."""

TOLERANCE = 0.0
"""The record consists of integers. Logits are compared unrounded and margins in float64; only rule
2's sum of exponentials is float32, a relative error of a probability of at most about 1e-7."""

_PORTS = (
    *("logits", "tokens", "forced", "drafted", "cap", "stop", "mask", "rule", "top_k", "margin"),
    *("close", "strict", "soft", "soft_margin"),
)
_SAMPLED = ("sampled", "last", "temperature")


def refuse(site: CallSite) -> str:
    """Returns why the kernel cannot run this call, or an empty string if it can."""
    rows, width = site.ports["logits"].shape
    if rows > MOST_ROWS:
        return f"accept.logits must be at most {MOST_ROWS} rows (got {rows})"
    words = -(-_limit(site) // 32)
    if "mask" in site and site.size("mask", 1) < words:
        return f"accept.mask must be {words} words a row (got {site.size('mask', 1)})"
    if len(given := [port for port in _SAMPLED if port in site]) not in (0, len(_SAMPLED)):
        return f"accept must have all of {', '.join(_SAMPLED)} or none (got {', '.join(given)})"
    if width < 1:
        return f"accept.logits must be at least 1 wide (got {width})"
    return ""


def launches(site: CallSite, device: Device) -> tuple[Launch, ...]:
    """Returns one launch, with a block for each slice of each row; the last block to finish writes
    the record.
    """
    del device
    rows, width = site.ports["logits"].shape
    grid = (slices(_limit(site)), rows, 1)
    sampled = "sampled" in site
    sizes = (
        rows,
        width,
        _limit(site),
        site.size("mask", 1) if "mask" in site else 0,
        site.size("stop", 0),
        site.size("strict", 0),
    )
    return (
        Launch(
            kernel="accept_rows",
            grid=grid,
            threads=THREADS,
            arguments=(
                *(Pointer(port) for port in (*_PORTS, *(_SAMPLED if sampled else ()), "record")),
                Scratch("found", 16 * grid[0] * rows),
                Scratch("arrivals", 4, zeroed=True),
                *(Int(size) for size in sizes),
            ),
            defines={**DEFINES, "MOST_ROWS": MOST_ROWS, **({"SAMPLED": 1} if sampled else {})},
        ),
    )


def _limit(site: CallSite) -> int:
    """Returns the number of logits of a row that may be chosen."""
    width = site.size("logits", 1)
    return min(site.attributes.integer("vocab") or width, width)


KERNELS = OpKernels(OP, launches, refuse)
