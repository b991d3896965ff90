"""linear on a GPU: memory-bound kernels for up to 32 rows, compute-bound kernels for more."""

from __future__ import annotations

from collections.abc import Mapping

from thor_dflash.plugins.contract import Attribute
from thor_dflash.plugins.launch import (
    ActiveClusters,
    CallSite,
    Choice,
    Device,
    Launch,
    OpKernels,
)
from thor_dflash.plugins.linear import OP, pack, prefill_launch
from thor_dflash.plugins.linear.decode_launch import (
    HEAD_COLUMNS,
    MOST_ROWS,
    Epilogue,
    FusedEpilogue,
    decode_candidates,
    decode_launches,
    head_squares,
    takes_heads,
)
from thor_dflash.plugins.linear.layout import KIND_OF
from thor_dflash.plugins.linear.prologue_launch import HEADS, refuse_types

TOLERANCE = 2.0**-7
"""Rows are bf16: both the result and the reference are rounded once, a relative error of at most
2^-8 each. After a norm or gate computed in float32, an element of a row may, rarely, round to the
bf16 neighbour of the reference's: up to 2^-7 of one of K terms. Weights are exact, sums float32."""

PAIR = 2
"""Columns that a thread stores with one instruction."""
_BLOCK = 16
_MOST_SEGMENTS = 16


def launches(site: CallSite, device: Device) -> tuple[Launch, ...]:
    """Returns the launch of the product, preceded by one for the prologue unless the call receives
    prepared rows. Calls of more than 32 rows go to prefill_launch.
    """
    if site.size("x", 0) > MOST_ROWS:
        return prefill_launch.launches(site, device)
    return decode_launches(site, device, _fused(site))


def candidates(site: CallSite, device: Device, active: ActiveClusters | None) -> tuple[Choice, ...]:
    """Returns the `Candidates` of a call."""
    if site.size("x", 0) > MOST_ROWS:
        return prefill_launch.candidates(site, device)
    return decode_candidates(site, device, active, _fused(site))


def _fused(site: CallSite) -> FusedEpilogue:
    a = site.attributes
    epilogue = Epilogue[a.word("epilogue").upper()]
    segments = a.integer("segments") if epilogue is Epilogue.NONE else 1
    return FusedEpilogue(epilogue, tuple(f"y{i}" for i in range(segments)))


def refuse(site: CallSite) -> str:
    """Returns why the kernels cannot run this call, or an empty string if they can."""
    a = site.attributes
    segments, head_dim, k = a.integer("segments"), a.integer("head_dim"), site.size("x", 1)
    if segments > _MOST_SEGMENTS:
        return f"linear.segments must be at most {_MOST_SEGMENTS} (got {segments})"
    if head_dim not in (0, k, *HEADS):
        return f"linear.head_dim must be K or one of {HEADS} (got {head_dim})"
    if head_dim and k % head_dim:
        return f"linear.head_dim must divide the {k} columns of x (got {head_dim})"
    why = refuse_weight(site, segments) or _refuse_swiglu(site) or _refuse_widths(site)
    return why or _refuse_heads(site) or _refuse_few(site)


def refuse_weight(site: CallSite, segments: int) -> str:
    """Returns why the kernels cannot take the rows, norm weight or weights of a linear or head
    call, or an empty string if they can.
    """
    op, k = site.op.name, site.size("x", 1)
    if why := refuse_types(site, ("x", "gate", "residual")) or _refuse_stored(site, segments):
        return why
    if k % _BLOCK:
        return f"{op}.x must have a multiple of {_BLOCK} columns (got {k})"
    return ""


def _refuse_stored(site: CallSite, segments: int) -> str:
    op = site.op.name
    for weight in (f"weight{i}" for i in range(segments)):
        if weight not in site:
            continue
        if (dtype := site.ports[weight].dtype) not in KIND_OF:
            return f"{op}.{weight} must be NVFP4, FP8 or bfloat16 (got {dtype.value})"
        if site.size(weight, 0) % PAIR:
            n = site.size(weight, 0)
            return f"{op}.{weight} must have a multiple of {PAIR} rows (got {n})"
    return ""


def _refuse_swiglu(site: CallSite) -> str:
    if site.attributes.word("epilogue") != "swiglu" or "weight0" not in site:
        return ""
    first, second = (site.ports[f"weight{i}"].dtype.value for i in (0, 1))
    if first != second:
        return (
            f"linear.weight1 must be stored as weight0 is, for swiglu (got {second}, not {first})"
        )
    gate, up = (site.size(f"weight{i}", 0) for i in (0, 1))
    if gate != up:
        return (
            f"linear.weight1 must have as many rows as weight0, for swiglu (got {up}, not {gate})"
        )
    return ""


def _refuse_heads(site: CallSite) -> str:
    """Why a product cannot take rows that lack the factors 1 / rms of their heads."""
    head_dim = site.attributes.integer("head_dim")
    if not head_dim or not {"x_slabs", "x_squares"} <= site.ports.keys():
        return ""
    if not takes_heads(site):
        rule = f"of an NVFP4 product without swiglu, normed by heads of {HEAD_COLUMNS}"
        return f"linear.x_squares must be {rule} (got head_dim {head_dim})"
    got, want = site.ports["x_squares"].shape, head_squares(site.size("x", 1) // head_dim)
    return "" if got == want else f"linear.x_squares must be {want} (got {got})"


def _refuse_few(site: CallSite) -> str:
    """Why a product of few rows cannot have what only a vision tower needs."""
    rows, epilogue = site.size("x", 0), site.attributes.word("epilogue")
    if rows > MOST_ROWS:
        return ""
    if "bias0" in site:
        return f"linear.bias0 must be of a call with more than {MOST_ROWS} rows (got {rows})"
    if epilogue.startswith("gelu"):
        rule = f"none, swiglu or residual with at most {MOST_ROWS} rows"
        return f"linear.epilogue must be {rule} (got {epilogue})"
    return ""


def _refuse_widths(site: CallSite) -> str:
    for port, shaped in site.ports.items():
        if port.rstrip("0123456789") == "y" and shaped.shape[1] % PAIR:
            return f"linear.{port} must have a multiple of {PAIR} columns (got {shaped.shape[1]})"
    return ""


def _one_weight(a: Mapping[str, Attribute]) -> bool:
    return a["segments"] == 1 and a["epilogue"] in ("none", "residual")


def _one_output(a: Mapping[str, Attribute]) -> bool:
    return _one_weight(a) or a["epilogue"] == "swiglu"


KERNELS = OpKernels(
    OP,
    launches,
    refuse,
    candidates,
    packed=pack.packed,
    pack=pack.pack,
    writes_slabs=_one_output,
    fuses_norm=_one_weight,
)
