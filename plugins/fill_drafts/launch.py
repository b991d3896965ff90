"""fill_drafts on a GPU: one thread per place."""

from __future__ import annotations

from thor_dflash.plugins.fill_drafts import OP
from thor_dflash.plugins.launch import CallSite, Device, Int, Launch, OpKernels, Pointer

TOLERANCE = 0.0
"""Ids are copied."""

MOST_ROWS = 1024
"""Threads of a block."""


def refuse(site: CallSite) -> str:
    """Returns why the kernel cannot run this call, or an empty string if it can."""
    rows, drafts = site.size("ids", 0), site.size("best", 0)
    if rows > MOST_ROWS:
        return f"fill_drafts.ids must be at most {MOST_ROWS} (got {rows})"
    if (end := site.attributes.integer("at") + drafts) > rows:
        return f"fill_drafts.at must leave places for {drafts} drafts of {rows} (got up to {end})"
    return ""


def launches(site: CallSite, device: Device) -> tuple[Launch, ...]:
    """Returns one launch."""
    del device
    rows = site.size("ids", 0)
    numbers = map(Int, (rows, site.size("best", 0), site.attributes.integer("at")))
    ports = map(Pointer, ("ids", "best", "tokens", "first"))
    return (Launch("fill_drafts", (1, 1, 1), 32 * -(-rows // 32), (*ports, *numbers)),)


KERNELS = OpKernels(OP, launches, refuse, optional=frozenset({"first"}))
