"""The configuration tree: frozen, complete after load, passed down by section.

There are no other settings: no environment variables, no module globals. Every default is given
once, in its section, with its reason. The docstring of a field is its line in
docs/reference/configuration.md, and the first sentence of it the help of its option.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

from thor_dflash.config.build import BuildConfig
from thor_dflash.config.calibrate import CalibrateConfig
from thor_dflash.config.decode import DecodeConfig
from thor_dflash.config.engine import EngineConfig
from thor_dflash.config.quality import QualityConfig
from thor_dflash.config.quantize import QuantizeConfig
from thor_dflash.config.serving import GatewayConfig, ServeConfig
from thor_dflash.core import message_text, strict_records
from thor_dflash.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All settings of thor-dflash."""

    build: BuildConfig = field(default_factory=BuildConfig)
    quantize: QuantizeConfig = field(default_factory=QuantizeConfig)
    calibrate: CalibrateConfig = field(default_factory=CalibrateConfig)
    quality: QualityConfig = field(default_factory=QualityConfig)
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
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{path} must be TOML in UTF-8 (got: {e})") from e


def _override(table: dict[str, Any], item: str) -> None:
    dotted, equals, text = item.partition("=")
    *path, key = dotted.strip().split(".")
    if not equals or not path or not key:
        raise ConfigError(f"--set must be section.key=value (got {message_text.show(item)})")
    if any(name.startswith(f"{dotted.strip()}.") for name in keys()):
        # A whole section would silently discard what was set for its keys before.
        got = message_text.show(item)
        raise ConfigError(f"--set must be of a key, not of a section (got {got})")
    row: dict[str, object] = table
    for section in path:
        inner = strict_records.as_table(row.setdefault(section, {}))
        if inner is None:
            return  # the file has a value in place of the section, which `load` refuses
        row = inner
    row[key] = _parse(text)


def _parse(text: str) -> object:
    """A TOML value; a bare word is a string."""
    try:
        table = tomllib.loads(f"v = {text}")
    except (ValueError, RecursionError):
        return text.strip()
    return table["v"] if len(table) == 1 else text


def keys() -> tuple[str, ...]:
    """Every dotted key of the configuration."""
    return tuple(key for key, _ in fields())


def texts() -> frozenset[str]:
    """The keys whose value is free text, such as a path."""
    return frozenset(key for key, hint in fields() if hint is str)


def fields(cls: Any = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key and its type, in order."""
    for name, hint in strict_records.hints(cls).items():
        if is_dataclass(hint):
            yield from fields(hint, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", hint
