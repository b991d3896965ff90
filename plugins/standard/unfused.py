"""Launches of what surrounds a product, as steps of their own: for measuring, never for speed.

Ports, bf16 unless a size says less, rows 16-byte aligned:
    rows              x [T, K], norm_weight bf16/f32 [K or head_dim] (optional), gate [T, K]
                      (optional) -> y [T, K]: the prologue of a linear, by the kernel that prefill
                      has for it
    add, silu_mul     a, b [T, W] -> y [T, W]: a + b, silu(a) * b
"""

from __future__ import annotations

from dataclasses import replace

from thor_dflash.plugins.launch import At, Int, Launch, Site
from thor_dflash.plugins.linear.prepare import HEADS, prepared

THREADS = 256
UNIT = 8
"""Elements of the 16 bytes one thread moves."""


def refuse_rows(site: Site) -> str:
    """Why the kernel does not take such rows; empty where it does."""
    width, head = site.size("x", 1), site.attributes.integer("head_dim")
    if width % UNIT:
        return f"rows.width must be a multiple of {UNIT} (got {width})"
    if head not in (0, width, *HEADS):
        return f"rows.head_dim must be 0, the width or one of {HEADS} (got {head})"
    return ""


def rows(site: Site) -> Launch:
    """Rows as they enter a product. Only where `refuse_rows` has nothing to say."""
    made, launches = prepared(site, "../linear/")
    (launch,) = launches
    arguments = tuple(At("y") if argument is made else argument for argument in launch.arguments)
    return replace(launch, arguments=arguments)


def refuse_pairs(site: Site) -> str:
    """Why `add` and `silu_mul` do not take such rows; empty where they do."""
    width = site.size("y", 1)
    return f"{site.op.name}.width must be a multiple of {UNIT} (got {width})" * bool(width % UNIT)


def pairs(site: Site) -> Launch:
    """`add` or `silu_mul`, by the site's op. Only where `refuse_pairs` has nothing to say."""
    count, width = site.ports["y"].shape
    units = count * width // UNIT
    return Launch(
        site.op.name,
        (-(-units // THREADS), 1, 1),
        THREADS,
        (At("a"), At("b"), At("y"), Int(units)),
        source="unfused.cu",
    )
