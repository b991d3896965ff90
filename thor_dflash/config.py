"""The one configuration tree: frozen, complete after load, passed down by section.

There are no other knobs: no environment variables, no module globals. A default is written here
once, beside its reason.
"""

from __future__ import annotations

import dataclasses
import tomllib
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from thor_dflash import records
from thor_dflash.errors import ConfigError

BLOCK = 16
"""Rows of a block where neither the configuration nor a drafter says."""

CAPACITY = 8192
"""Context where nobody asks for another, tokens."""


def _at_least(key: str, value: int, low: int) -> None:
    if value < low:
        raise ConfigError(f"{key} must be >= {low} (got {value})")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildConfig:
    """What `thor-dflash build` makes of two checkpoints."""

    engine: Literal["ort"] = "ort"
    """Which engine the package is for."""
    block: int = 0
    """Rows of the verify block; 0 takes the drafter's, or 16 without a drafter."""
    chunk: int = 64
    """Rows of a prefill step."""
    kv: Literal["f32", "bf16", "fp8"] = "f32"
    """Element type of the target's KV cache."""
    activations: Literal["f32", "bf16"] = "f32"
    """Where the graph rounds between layers; f32 does not round."""
    saves: Literal["records", "states"] = "records"
    """How a block's GDN steps are kept until the commit: inputs to replay, or a state per row."""
    capacity: int = 0
    """Context a session gets when it asks for none, tokens; 0 takes CAPACITY, or the longest the
    model was made for if that is less."""

    def __post_init__(self) -> None:
        _at_least("build.block", self.block, 0)
        if self.block == 1:
            raise ConfigError("build.block must be 0 or >= 2 (got 1)")
        _at_least("build.chunk", self.chunk, 1)
        _at_least("build.capacity", self.capacity, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How this machine runs a package."""

    capacity: int = 0
    """Context of the session, tokens; 0 takes the package's."""
    threads: int = 0
    """CPU threads; 0 takes every core."""

    def __post_init__(self) -> None:
        _at_least("engine.capacity", self.capacity, 0)
        _at_least("engine.threads", self.threads, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """How one answer is decoded."""

    drafter: Literal["auto", "dflash", "none"] = "auto"
    """Who proposes; auto takes the package's drafter, or none where it has none."""
    max_tokens: int = 1024
    """Longest answer, thinking included, tokens."""
    thinking: Literal["on", "off"] = "on"
    ignore_eos: bool = False
    """Go on past the stop tokens, up to max_tokens. For measurements."""

    def __post_init__(self) -> None:
        _at_least("decode.max_tokens", self.max_tokens, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """How plans are served. The wire protocol is in docs/protocol.md."""

    bind: tuple[str, ...] = ("tcp://127.0.0.1:5571",)
    """Endpoints. Loopback: a planner moves a robot. 5555 would be a GR00T server's."""
    curve: str = ""
    """Directory of `thor-dflash keygen`; "" serves without encryption."""
    insecure: bool = False
    """Allow other machines to connect without CURVE."""
    token_file: str = ""
    """File holding a secret that every request must name; "" asks for none."""
    allow_admin: bool = False
    """Answer drain and shutdown. On ipc and CURVE endpoints only."""
    max_queue: int = 4
    """Plans waiting, over all sessions. A robot would rather hear no than wait for its turn."""
    max_message: int = 1 << 20
    """Largest frame, bytes; a peer that sends a larger one is disconnected."""
    max_tokens: int = 512
    """Longest answer where a request does not say, thinking not counted, tokens."""
    thinking: Literal["on", "off", "auto"] = "auto"
    """Where a request does not say; auto thinks wherever the deadline leaves room."""
    thinking_budget: int = 1024
    """Longest thinking where a request does not say, tokens."""
    watchdog_s: float = 10.0
    """A step that takes longer means a dead device: the process ends, for systemd to restart."""
    drain_s: float = 30.0
    """How long SIGTERM lets accepted plans finish. A plan of the 27B takes 10 to 20 s."""
    prefix_mb: int = 1024
    """Memory for pinned prefixes, MB: about six of the 27B."""
    log_prompts: bool = False

    def __post_init__(self) -> None:
        if not self.bind:
            raise ConfigError("serve.bind must have at least one endpoint (got none)")
        _at_least("serve.max_queue", self.max_queue, 1)
        _at_least("serve.max_message", self.max_message, 1024)
        _at_least("serve.max_tokens", self.max_tokens, 1)
        _at_least("serve.thinking_budget", self.thinking_budget, 0)
        _at_least("serve.prefix_mb", self.prefix_mb, 0)
        if not self.watchdog_s > 0 or not self.drain_s >= 0:
            raise ConfigError(
                "serve.watchdog_s must be > 0 and serve.drain_s >= 0 "
                f"(got {self.watchdog_s} and {self.drain_s})"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything thor-dflash can be told."""

    build: BuildConfig = field(default_factory=BuildConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)


def load(path: Path | None = None, overrides: tuple[str, ...] = ()) -> Config:
    """Read a TOML file, lay `a.b=value` overrides over it, check every key, type and value.

    Raises:
        ConfigError: an unreadable file, an unknown key, a wrong type, or a value a section refuses.
    """
    table = {} if path is None else _read(path)
    for item in overrides:
        _override(table, item)
    _check_engine(table)
    return records.decode(Config, table, "", ConfigError)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"{path} must be a readable file (got: {e.strerror})") from e
    except ValueError as e:
        raise ConfigError(f"{path} must be TOML in UTF-8 (got: {e})") from e


def _override(table: dict[str, Any], item: str) -> None:
    dotted, equals, text = item.partition("=")
    section, _, key = dotted.strip().partition(".")
    if not equals or not key:
        raise ConfigError(
            f"--set must be section.key=value (got {records.show(item)}){_meant(item)}"
        )
    row = records.as_table(table.setdefault(section, {}))
    if row is None:
        raise ConfigError(f"{section} must be a section (got {records.show(table[section])})")
    row[key] = _parse(text)


def _meant(item: str) -> str:
    key = item.partition("=")[0].strip()
    near = [name for name in keys() if name.partition(".")[2] == key]
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _parse(text: str) -> object:
    """A TOML value; a bare word is a string."""
    try:
        table = tomllib.loads(f"v = {text}")
    except tomllib.TOMLDecodeError:
        return text.strip()
    return table["v"] if len(table) == 1 else text


def _check_engine(table: dict[str, Any]) -> None:
    # Before the general check, whose words would not say why a planned engine is refused.
    engine = (records.as_table(table.get("build")) or {}).get("engine")
    if engine in ("cuda", "tensorrt"):
        raise ConfigError(
            f'build.engine must be "ort", the only engine of this version (got "{engine}")'
        )


def keys() -> tuple[str, ...]:
    """Every dotted key there is."""
    sections = typing.get_type_hints(Config)
    return tuple(f"{s}.{f.name}" for s, cls in sections.items() for f in dataclasses.fields(cls))
