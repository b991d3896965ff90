"""head on a GPU: the vocabulary projection, then the best id of each row."""

from __future__ import annotations

from thor_dflash.plugins.head import OP
from thor_dflash.plugins.head.argmax_launch import best_launches
from thor_dflash.plugins.launch import (
    ActiveClusters,
    CallSite,
    Choice,
    Device,
    Launch,
    OpKernels,
)
from thor_dflash.plugins.linear import pack
from thor_dflash.plugins.linear.decode_launch import (
    MOST_ROWS,
    Epilogue,
    FusedEpilogue,
    decode_candidates,
    decode_launches,
)
from thor_dflash.plugins.linear.launch import PAIR, refuse_weight

TOLERANCE = 2.0**-8
"""For the logits: as in linear, but without the final rounding."""

_FUSED = FusedEpilogue(Epilogue.LOGITS, ("logits",), folder="../linear/")


def launches(site: CallSite, device: Device) -> tuple[Launch, ...]:
    """Returns the launches of the norm and projection, as linear's, and, if the call has the port
    `best`, of the search over the logits.
    """
    search = best_launches(site, device, "logits") if "best" in site else ()
    return (*decode_launches(site, device, _FUSED), *search)


def candidates(site: CallSite, device: Device, active: ActiveClusters | None) -> tuple[Choice, ...]:
    """Returns the `Candidates` of a call."""
    return decode_candidates(site, device, active, _FUSED)


def refuse(site: CallSite) -> str:
    """Returns why the kernels cannot run this call, or an empty string if they can."""
    rows, width = site.ports["logits"].shape
    if rows > MOST_ROWS:
        return f"head.x must be at most {MOST_ROWS} rows (got {rows})"
    if width % PAIR:
        return f"head.logits must have a multiple of {PAIR} columns (got {width})"
    return refuse_weight(site, 1)


KERNELS = OpKernels(
    OP,
    launches,
    refuse,
    candidates,
    optional=frozenset({"best"}),
    packed=pack.packed,
    pack=pack.pack,
)
