"""Which linears a preset quantises, and to what.

Presets named after a publisher have the layout of its checkpoint of Qwen3.6-27B or Qwen3.8-27B.
Sources: headers and quantisation configs of these repositories (docs/guide/quantize.md lists them).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from thor_dflash.builders.checkpoint.quantized_matrix import WeightFormat
from thor_dflash.core.errors import ConfigError
from thor_dflash.core.message_text import show

ENDINGS: Mapping[str, tuple[str, ...]] = {
    "mlp": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    "attention": tuple(f"self_attn.{part}_proj" for part in "qkvo"),
    "gdn_in": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    "gdn_out": ("linear_attn.out_proj",),
    "head": ("lm_head",),
    "fc": ("fc",),
}
"""Class -> the ends of its linears' names. Linears of no class are never quantised, because
they have few rows: in_proj_a, in_proj_b, kernel_projection, hidden_projection."""
ALIASES: Mapping[str, tuple[str, ...]] = {"gdn": ("gdn_in", "gdn_out")}
FORMATS: Mapping[str, WeightFormat | None] = {
    "nvfp4": WeightFormat.NVFP4,
    "fp8": WeightFormat.FP8,
    "keep": None,
}
PRESETS: Mapping[str, str] = {
    "nvidia": "mlp=nvfp4 head=nvfp4 attention=fp8 gdn=fp8",
    "unsloth": "mlp=nvfp4 attention=nvfp4 gdn_out=nvfp4",
    "unsloth-3.8": "mlp=nvfp4 mlp:56-63=fp8 attention=fp8 gdn=fp8 head=fp8",
    "redhat": "mlp=nvfp4 attention=nvfp4",
    "berkerdooo": "mlp=nvfp4 attention=nvfp4 gdn=nvfp4",
    "all-nvfp4": "mlp=nvfp4 attention=nvfp4 gdn=nvfp4 head=nvfp4 fc=nvfp4",
    "mlp": "mlp=nvfp4",
    "fp8": "mlp=fp8 attention=fp8 gdn=fp8 head=fp8 fc=fp8",
    "keep": "",
}
"""Preset -> its rules; a later one wins, and without one a linear stays as it is."""
DRAFTER_PRESETS = ("all-nvfp4", "mlp", "fp8", "keep")

_RULE = re.compile(r"([a-z_]+)(?::(\d{1,9})-(\d{1,9}))?=([a-z0-9]+)")
_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class ClassRule:
    """The format of one class, of all layers or of some."""

    text: str
    classes: tuple[str, ...]
    format: WeightFormat | None
    """None: as stored."""
    first: int | None = None
    last: int | None = None

    def matches(self, name: str) -> bool:
        """Whether the rule is about the linear `name`."""
        if class_of(name) not in self.classes:
            return False
        layer = _LAYER.search(name)
        if self.first is None or self.last is None:
            return True
        return layer is not None and self.first <= int(layer[1]) <= self.last


def class_of(name: str) -> str:
    """Return the class of the linear `name`; "" for none."""
    for label, endings in ENDINGS.items():
        if any(name == end or name.endswith(f".{end}") for end in endings):
            return label
    return ""


def read_rule(text: str) -> ClassRule:
    """Read one entry of `quantize.classes`.

    Raises: ConfigError.
    """
    known = (*ENDINGS, *ALIASES)
    match = _RULE.fullmatch(text)
    if not match or match[1] not in known or match[4] not in FORMATS:
        raise ConfigError(
            f"quantize.classes must be CLASS=FORMAT or CLASS:FIRST-LAST=FORMAT, with CLASS one of "
            f"{', '.join(known)} and FORMAT one of {', '.join(FORMATS)} (got {show(text)})"
        )
    name, first, last = match[1], match[2], match[3]
    return ClassRule(
        text,
        ALIASES.get(name, (name,)),
        FORMATS[match[4]],
        int(first) if first else None,
        int(last) if last else None,
    )


def formats(
    names: Iterable[str], preset: str, own: Iterable[str]
) -> dict[str, WeightFormat | None]:
    """Return the format of each linear; None: as stored.

    Raises: ConfigError for an entry of `own`, or a rule for some layers, that matches no linear.
    """
    given = [read_rule(text) for text in own]
    rules = [*map(read_rule, PRESETS[preset].split()), *given]
    found = {name: [rule for rule in rules if rule.matches(name)] for name in names}
    used = {rule.text for matching in found.values() for rule in matching}
    for rule in rules:
        if rule.text not in used and (rule in given or rule.first is not None):
            key = "quantize.classes" if rule in given else f"quantize.preset {preset}"
            raise ConfigError(f"{key} must name linears of this model (got {rule.text})")
    return {name: matching[-1].format if matching else None for name, matching in found.items()}
