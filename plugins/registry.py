"""The launch rules of all rooms, and of the standard nodes that our graphs use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from thor_dflash import plugins
from thor_dflash.core.tensors import Array
from thor_dflash.plugins import OPS, Op
from thor_dflash.plugins.accept import launch as accept
from thor_dflash.plugins.context_kv import launch as context_kv
from thor_dflash.plugins.contract import Attribute
from thor_dflash.plugins.draft_attention import launch as draft_attention
from thor_dflash.plugins.gdn import launch as gdn
from thor_dflash.plugins.head import launch as head
from thor_dflash.plugins.launch import Device, Launch, Shaped, Site
from thor_dflash.plugins.linear import launch as linear
from thor_dflash.plugins.linear import pack
from thor_dflash.plugins.standard import launch as standard
from thor_dflash.plugins.standard import unfused
from thor_dflash.plugins.standard.nodes import (
    ADD,
    COMPOSE,
    CONCAT,
    EMBED,
    ROWS,
    SILU_MUL,
)
from thor_dflash.plugins.verify_attention import launch as verify_attention

Pack = Callable[[Site, Mapping[str, Array]], dict[str, Array]]


def _nothing(site: Site) -> str:
    return ""


def _never(attributes: Mapping[str, Attribute]) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Rule:
    """What an engine needs to know about a room."""

    op: Op
    folder: Path
    """The folder with the source files of the launches."""
    launches: Callable[[Site, Device], tuple[Launch, ...]]
    refuse: Callable[[Site], str] = _nothing
    """Returns why the kernels cannot run a call, or "" if they can."""
    in_place: frozenset[str] = frozenset()
    """Outputs that overwrite the input whose next value they are."""
    optional: frozenset[str] = frozenset()
    """Outputs that a call may leave out if nothing reads them."""
    packed: Callable[[Site], Mapping[str, Shaped]] | None = None
    """Returns the ports that replace weight#, block_scale# and row_scale#."""
    pack: Pack | None = None
    norms: Callable[[Mapping[str, Attribute]], bool] = _never
    """Whether a call can output its rows with the next product's norm weight applied: ports
    next_norm_weight, y0_slabs and y0_squares."""
    slabs: Callable[[Mapping[str, Attribute]], bool] = _never
    """Whether a call can output its rows unchanged in the form of the next product's input: port
    y0_slabs."""
    ahead: Callable[[Mapping[str, Attribute]], bool] = _never
    """Whether a call of few rows can prefetch the next product's weight: port next_packed."""
    finishes: Callable[[Mapping[str, Attribute]], bool] = _never
    """Whether a call can output its rows with the weight of the next product's norm by head and the
    silu of its gate applied: ports next_gate, next_norm_weight, y0_slabs and y0_squares (by head).
    """
    gates: bool = False
    """Whether a call can output its rows times the sigmoid of a gate for the next product: ports
    next_gate and y0_slabs."""


def _always(attributes: Mapping[str, Attribute]) -> bool:
    return True


def _verifies(attributes: Mapping[str, Attribute]) -> bool:
    return attributes["mode"] == "verify"


def _single(attributes: Mapping[str, Attribute]) -> bool:
    return attributes["segments"] == 1 and attributes["epilogue"] in ("none", "residual")


def _one(attributes: Mapping[str, Attribute]) -> bool:
    return _single(attributes) or attributes["epilogue"] == "swiglu"


def _embed(site: Site, device: Device) -> tuple[Launch, ...]:
    (rows, hidden), vocab = site.ports["rows"].shape, site.size("table", 0)
    a, weight = site.attributes, site.ports.get("next_norm_weight")
    count, mask = (1, a.integer("mask")) if a.integer("mask") >= 0 else (rows, 0)
    norm, offset = (weight.dtype, a.real("next_norm_offset")) if weight else (None, 0.0)
    one = standard.embed(rows, vocab, hidden, count=count, filler=mask, norm=norm, offset=offset)
    return (one,)


def _refuse_embed(site: Site) -> str:
    return standard.refuse_embed(site.ports["table"].dtype, site.size("rows", 1))


def _widths(site: Site) -> list[int]:
    count = sum(port.startswith("x") for port in site.ports)
    return [site.size(f"x{i}", 1) for i in range(count)]


def _concat(site: Site, device: Device) -> tuple[Launch, ...]:
    return (standard.concat(site.size("y", 0), _widths(site)),)


def _refuse_concat(site: Site) -> str:
    return standard.refuse_concat(_widths(site))


def _compose(site: Site, device: Device) -> tuple[Launch, ...]:
    return (standard.compose(site.size("tokens", 0)),)


def _rows(site: Site, device: Device) -> tuple[Launch, ...]:
    return (unfused.rows(site),)


def _pairs(site: Site, device: Device) -> tuple[Launch, ...]:
    return (unfused.pairs(site),)


ROOT = Path(plugins.__file__).parent
_ROOMS = {op.name: op for op in OPS}

RULES: Mapping[str, Rule] = {
    "linear": Rule(
        _ROOMS["linear"],
        ROOT / "linear",
        linear.launches,
        linear.refuse,
        packed=pack.packed,
        pack=pack.pack,
        norms=_single,
        slabs=_one,
    ),
    "head": Rule(
        _ROOMS["head"],
        ROOT / "head",
        head.launches,
        head.refuse,
        optional=frozenset({"best"}),
        packed=pack.packed,
        pack=pack.pack,
    ),
    "gdn": Rule(
        _ROOMS["gdn"],
        ROOT / "gdn",
        gdn.launches,
        gdn.refuse,
        gdn.IN_PLACE,
        ahead=_verifies,
        finishes=_verifies,
    ),
    "verify_attention": Rule(
        _ROOMS["verify_attention"],
        ROOT / "verify_attention",
        verify_attention.launches,
        verify_attention.refuse,
        verify_attention.IN_PLACE,
        ahead=_always,
        gates=True,
    ),
    "draft_attention": Rule(
        _ROOMS["draft_attention"],
        ROOT / "draft_attention",
        draft_attention.launches,
        draft_attention.refuse,
        slabs=_always,
    ),
    "context_kv": Rule(
        _ROOMS["context_kv"],
        ROOT / "context_kv",
        context_kv.launches,
        context_kv.refuse,
        context_kv.IN_PLACE,
    ),
    "accept": Rule(_ROOMS["accept"], ROOT / "accept", accept.launches, accept.refuse),
    "embed": Rule(EMBED, ROOT / "standard", _embed, _refuse_embed, norms=_always),
    "concat": Rule(CONCAT, ROOT / "standard", _concat, _refuse_concat),
    "compose": Rule(COMPOSE, ROOT / "standard", _compose),
    "rows": Rule(ROWS, ROOT / "standard", _rows, unfused.refuse_rows),
    "add": Rule(ADD, ROOT / "standard", _pairs, unfused.refuse_pairs),
    "silu_mul": Rule(SILU_MUL, ROOT / "standard", _pairs, unfused.refuse_pairs),
}
