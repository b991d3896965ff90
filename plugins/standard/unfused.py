"""Separate launches for the operations that `linear` fuses with a product: for measurements only.

Ports, bf16 unless another type is given, rows 16-byte aligned:
    rows              x [T, K], norm_weight bf16/f32 [K or head_dim] (optional), gate [T, K]
                      (optional) -> y [T, K]: the prologue of a linear, by the same kernel that
                      prefill uses
    add, silu_mul     a, b [T, W] -> y [T, W]: a + b, silu(a) * b
"""

from __future__ import annotations

from dataclasses import replace

from thor_dflash.plugins.launch import CallSite, Int, Launch, Pointer
from thor_dflash.plugins.linear.prologue_launch import HEADS, prepared, refuse_types

THREADS = 256
UNIT = 8
"""Elements in the 16 bytes that a thread processes."""


def refuse_rows(site: CallSite) -> str:
    """Returns why the kernel cannot take these rows, or an empty string if it can."""
    width, head = site.size("x", 1), site.attributes.integer("head_dim")
    if width % UNIT:
        return f"rows.width must be a multiple of {UNIT} (got {width})"
    if head not in (0, width, *HEADS):
        return f"rows.head_dim must be 0, the width or one of {HEADS} (got {head})"
    return refuse_types(site, ("x", "gate"))


def rows(site: CallSite) -> Launch:
    """Returns the launch that prepares a product's input rows. `refuse_rows` must return an empty
    string.
    """
    made, launches = prepared(site, "../linear/")
    (launch,) = launches
    arguments = tuple(
        Pointer("y") if argument is made else argument for argument in launch.arguments
    )
    return replace(launch, arguments=arguments)


def refuse_pairs(site: CallSite) -> str:
    """Returns why `add` and `silu_mul` cannot take these rows, or an empty string if they can."""
    width = site.size("y", 1)
    if width % UNIT:
        return f"{site.op.name}.width must be a multiple of {UNIT} (got {width})"
    return refuse_types(site, ("a", "b"))


def pairs(site: CallSite) -> Launch:
    """Returns the launch of `add` or `silu_mul`, by the site's op. `refuse_pairs` must return an
    empty string.
    """
    count, width = site.ports["y"].shape
    units = count * width // UNIT
    return Launch(
        site.op.name,
        (-(-units // THREADS), 1, 1),
        THREADS,
        (Pointer("a"), Pointer("b"), Pointer("y"), Int(units)),
        source="unfused.cu",
    )
