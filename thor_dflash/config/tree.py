"""The configuration tree: frozen, complete after load, passed down by section.

There are no other settings: no environment variables, no module globals. Every default is given
here once, with its reason.
"""

from __future__ import annotations

import dataclasses
import tomllib
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from thor_dflash.config.serving import GatewayConfig, ServeConfig
from thor_dflash.config.tensorrt import TensorRTConfig, directory
from thor_dflash.core import strict_records
from thor_dflash.core.errors import ConfigError

BLOCK = 16
"""Rows of a block if neither the configuration nor a drafter says."""

CAPACITY = 8192
"""Default context, tokens."""

LONGEST_NAME = 100
"""Longest name of a model, characters."""


LARGEST = 2**31
"""Exclusive upper limit of numbers passed to a graph or a driver, whose integers have 32 bits."""


def _at_least(key: str, value: int, low: int) -> None:
    if value < low:
        raise ConfigError(f"{key} must be >= {low} (got {value})")


def _within(key: str, value: float) -> None:
    if not 0 < value <= 1:
        raise ConfigError(f"{key} must be above 0 and at most 1 (got {value})")


CLOSING_MESSAGE = (
    "Considering the limited time by the user, I have to give the solution based on the thinking "
    "directly now.\n</think>\n\n"
)
"""The message that closes thinking at its budget. Source: the model card of Qwen3.6-27B."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardConfig:
    """The model card of a package: the lengths that the model's makers recommend, in tokens.

    0 means by rule: max_tokens is 32768 or the longest the model was made for if that is less;
    complex is 81920 likewise; reply is an eighth of max_tokens but at most 4096. With think =
    max_tokens - reply: low is an eighth of think, medium is half, high is all of it; max is complex
    - reply; x_high is half way between high and max. Source: Lucebox model_card.cpp and its table
    of families.
    """

    max_tokens: int = 0
    """Longest answer, thinking included."""
    complex: int = 0
    """The same for hard problems."""
    reply: int = 0
    """Reserved for closing message and reply when thinking has a budget."""
    low: int = 0
    medium: int = 0
    high: int = 0
    x_high: int = 0
    max: int = 0
    close: str = CLOSING_MESSAGE
    """The message that closes thinking at its budget. Must hold </think> once, followed by at most
    a blank line if grammars are to be used."""
    source: str = ""
    """Where these numbers come from."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "complex", "reply", "low", "medium", "high", "x_high", "max"):
            _at_least(f"build.card.{name}", getattr(self, name), 0)
        for name in ("close", "source"):
            try:
                getattr(self, name).encode()
            except UnicodeEncodeError as e:
                raise ConfigError(f"build.card.{name} must be UTF-8 (got: {e})") from e
        if self.close.count("</think>") != 1:
            raise ConfigError(
                f"build.card.close must hold </think> once (got {strict_records.show(self.close)})"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildConfig:
    """How `thor-dflash build` makes a package from checkpoints."""

    engine: Literal["ort", "cuda", "tensorrt"] = "ort"
    """The engine that the package is for."""
    block: int = 0
    """Rows of the verify block; 0: the drafter's, or 16 without a drafter."""
    chunk: int = 0
    """Rows of a prefill step; 0: 64 on ort, else 512."""
    chunks: tuple[int, ...] = ()
    """Further sizes of a prefill step, rows; empty: 256, 128, 64 and 32 on cuda, 128 on tensorrt,
    none on ort. A server chooses among all sizes by the measured time of a step: larger ones read a
    prompt faster, but delay a cancel and keep prefixes in larger pieces. A prompt's last step uses
    the smallest size that holds the rest."""
    kv: Literal["auto", "f32", "bf16", "fp8"] = "auto"
    """Element type of the target's KV cache; auto is f32 on ort, else fp8."""
    activations: Literal["auto", "f32", "bf16"] = "auto"
    """Element type to which the graph rounds between layers; f32 does not round. auto is f32 on
    ort, else bf16, the only type that our kernels support."""
    saves: Literal["records", "states"] = "records"
    """What is kept of a block's GDN steps until the commit: inputs to replay, or a state a row."""
    capacity: int = 0
    """Default context of a session, tokens; 0: CAPACITY, or the longest the model was made for if
    that is less."""
    widths: tuple[int, ...] = ()
    """Narrower blocks that a session may choose, rows. Must be multiples of 4 to give the same
    tokens: ONNX Runtime computes some functions four elements at a time."""
    draft_ids: str = ""
    """A JSON file with the vocabulary ids that the drafter may propose, ascending; its head then
    reads only those rows. Empty: all ids. Source: EAGLE-3's reduced draft vocabulary."""
    name: str = ""
    """What clients call the model; empty: as the target's directory."""
    card: CardConfig = field(default_factory=CardConfig)
    tensorrt: TensorRTConfig = field(default_factory=TensorRTConfig)

    def __post_init__(self) -> None:
        _at_least("build.block", self.block, 0)
        if self.block == 1:
            raise ConfigError("build.block must be 0 or >= 2 (got 1)")
        _at_least("build.chunk", self.chunk, 0)
        if len(set(self.chunks)) < len(self.chunks) or any(rows < 1 for rows in self.chunks):
            raise ConfigError(f"build.chunks must be >= 1, each once (got {list(self.chunks)})")
        _at_least("build.capacity", self.capacity, 0)
        if len(set(self.widths)) < len(self.widths) or any(w < 4 or w % 4 for w in self.widths):
            raise ConfigError(
                f"build.widths must be multiples of 4, each once (got {list(self.widths)})"
            )
        if len(self.name) > LONGEST_NAME or not self.name.isprintable():
            rule = f"at most {LONGEST_NAME} printable characters"
            raise ConfigError(f"build.name must be {rule} (got {strict_records.show(self.name)})")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How this machine runs a package."""

    capacity: int = 0
    """Context of the session, tokens; 0: the package's."""
    threads: int = 0
    """ort: CPU threads, at most one per core of the machine that opens the package; 0: every
    core."""
    block: int = 0
    """Rows of a verify block, one of the package's widths; 0: the package's own block."""
    chunk: int = 0
    """Rows of the largest prefill step, one of the package's sizes; 0: the package's own, or a
    server's choice by the measured time of a step."""
    device: int = 0
    """cuda, tensorrt: index of the device, as the driver numbers them."""
    graphs: bool = True
    """cuda, tensorrt: replay each step as one CUDA graph; false launches its kernels one by one."""
    overlap: bool = True
    """cuda, tensorrt: let a kernel prefetch its weights while the previous kernel finishes
    (programmatic dependent launch)."""
    cubins: str = "~/.cache/thor-dflash/cubins"
    """cuda, tensorrt: directory of compiled kernels."""

    def __post_init__(self) -> None:
        _at_least("engine.capacity", self.capacity, 0)
        _at_least("engine.threads", self.threads, 0)
        _at_least("engine.block", self.block, 0)
        _at_least("engine.chunk", self.chunk, 0)
        if not 0 <= self.device < LARGEST:
            raise ConfigError(f"engine.device must be 0 to {LARGEST - 1} (got {self.device})")

    @property
    def cubins_directory(self) -> Path:
        """See `directory`."""
        return directory("engine.cubins", self.cubins)


Effort = Literal["", "none", "minimal", "low", "medium", "high", "x-high", "max"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetConfig:
    """How long an answer may think."""

    tokens: int = -1
    """Thinking tokens before thinking is closed; -1: no budget, unless `effort` names one."""
    effort: Effort = ""
    """A budget by name, from the package's model card; `none` means no thinking. `tokens` takes
    precedence."""
    close: Literal["hard", "soft"] = "hard"
    """hard: thinking is closed at the budget and not before. soft: also in the last part of the
    budget, at a row where the target nearly chooses to close it."""
    reply: int = 0
    """Tokens reserved for closing message and reply; 0: the card's, or what max_tokens leaves if
    that is less."""
    message: str = ""
    """The message that closes thinking at the budget. Must hold </think> once, followed by at most
    a blank line if there is a grammar. Empty: the card's."""
    ratio: float = 0.5
    """soft: smallest ratio of p(</think>) to the largest p at which </think> is chosen. Half: only
    at near ties, where rounding decides and not the model."""
    soften: float = 0.5
    """soft: share of the budget before which no row is soft."""

    def __post_init__(self) -> None:
        _at_least("decode.budget.tokens", self.tokens, -1)
        _at_least("decode.budget.reply", self.reply, 0)
        _within("decode.budget.ratio", self.ratio)
        _within("decode.budget.soften", self.soften)


NO_BUDGET = BudgetConfig()
RELAXED = {"margin": (3, 1.0), "delta": (10, 0.6)}
"""k and margin of each rule. Source: FlashRT; TensorRT-LLM's example for DeepSeek-R1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaxedConfig:
    """Which drafts relaxed acceptance accepts inside the thinking block."""

    rule: Literal["margin", "delta"] = "margin"
    """margin: FlashRT's, by log-probability; delta: TensorRT-LLM's, by probability."""
    k: int = 0
    """Largest rank of a draft among the target's choices, 1 being the best; 0: as in RELAXED."""
    margin: float = -1.0
    """Largest distance from the target's best, in nats or probability; -1: as in RELAXED."""

    def __post_init__(self) -> None:
        if not 0 <= self.k < LARGEST:
            raise ConfigError(f"decode.relaxed.k must be 0 to {LARGEST - 1} (got {self.k})")
        if not (self.margin == -1 or 0 <= self.margin < LARGEST):
            raise ConfigError(
                f"decode.relaxed.margin must be -1, or 0 to {LARGEST - 1} (got {self.margin})"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """How much of the context the drafter sees, tokens. 0: all that it was made for."""

    window: int = 0
    """Window of its sliding layers; each row of a block has its own window."""
    full: int = 0
    """Window of its full layers."""
    context: int = 0
    """Positions before the block visible to any layer, the same for all rows; FlashRT uses 128."""
    seed: int = 0
    """Positions at the end of the prompt that the drafter is shown."""

    def __post_init__(self) -> None:
        for name in ("window", "full", "context", "seed"):
            _at_least(f"decode.draft.{name}", getattr(self, name), 0)


NO_DRAFT_LIMITS = DraftConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """How one answer is decoded."""

    drafter: Literal["auto", "dflash", "none"] = "auto"
    """The proposer; auto: the package's drafter, or none if it has none."""
    max_tokens: int = 1024
    """Longest answer, thinking included, tokens."""
    thinking: Literal["on", "off"] = "on"
    ignore_eos: bool = False
    """Go on past the stop tokens, up to max_tokens. For measurements."""
    accept: Literal["strict", "relaxed"] = "strict"
    """relaxed: accept near misses of the drafter inside the thinking block, which changes it."""
    gate: Literal["on", "off"] = "off"
    """Skip the drafter while it does not pay off. Off by default: then it does not depend on the
    clock which steps are drafted, and a drafter trained for its target pays off."""
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    relaxed: RelaxedConfig = field(default_factory=RelaxedConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)

    def __post_init__(self) -> None:
        _at_least("decode.max_tokens", self.max_tokens, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All settings of thor-dflash."""

    build: BuildConfig = field(default_factory=BuildConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)


def load(path: Path | None = None, overrides: tuple[str, ...] = ()) -> Config:
    """Read a TOML file, apply `a.b=value` overrides, check every key, type and value.

    Raises:
        ConfigError: an unreadable file, an unknown key, a wrong type, or a value a section refuses.
    """
    table = {} if path is None else _read(path)
    for item in overrides:
        _override(table, item)
    return strict_records.decode(Config, table, "", ConfigError)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(strict_records.read_text(path))
    except OSError as e:
        raise ConfigError(f"{path} must be a readable file (got: {e.strerror})") from e
    except RecursionError as e:
        raise ConfigError(f"{path} must be TOML (got lists nested too deep)") from e
    except ValueError as e:
        raise ConfigError(f"{path} must be TOML in UTF-8 (got: {e})") from e


def _override(table: dict[str, Any], item: str) -> None:
    dotted, equals, text = item.partition("=")
    *path, key = _split(dotted.strip())
    if not equals or not path or not key:
        raise ConfigError(
            f"--set must be section.key=value (got {strict_records.show(item)}){_meant(item)}"
        )
    if any(name.startswith(f"{'.'.join((*path, key))}.") for name in keys()):
        # A whole section would silently discard what was set for its keys before.
        got = strict_records.show(item)
        raise ConfigError(f"--set must be of a key, not of a section (got {got})")
    row: dict[str, object] = table
    for section in path:
        inner = strict_records.as_table(row.setdefault(section, {}))
        if inner is None:
            return  # the file has a value in place of the section, which `load` refuses
        row = inner
    row[key] = _parse(text)


def _split(dotted: str, cls: Any = Config) -> list[str]:
    """Split a dotted key into its sections and the remaining key."""
    first, _, rest = dotted.partition(".")
    inner = typing.get_type_hints(cls).get(first)
    if dataclasses.is_dataclass(inner) and rest:
        return [first, *_split(rest, inner)]
    return [first, rest] if cls is Config and rest else [dotted]


def _meant(item: str) -> str:
    key = item.partition("=")[0].strip()
    near = [name for name in keys() if name.rpartition(".")[2] == key]
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _parse(text: str) -> object:
    """A TOML value; a bare word is a string."""
    try:
        table = tomllib.loads(f"v = {text}")
    except (ValueError, RecursionError):
        return text.strip()
    return table["v"] if len(table) == 1 else text


def keys() -> tuple[str, ...]:
    """Every dotted key of the configuration."""
    return tuple(key for key, _ in _hints(Config, ""))


def texts() -> frozenset[str]:
    """The keys whose value is free text, such as a path."""
    return frozenset(key for key, hint in _hints(Config, "") if hint is str)


def _hints(cls: Any, prefix: str) -> Iterator[tuple[str, object]]:
    for name, hint in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            yield from _hints(hint, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", hint
