"""Refuses a --set that has no effect on a command. A configuration file may hold it for others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from thor_dflash.errors import ConfigError


def items(given: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Key and value of every `--set key=value`."""
    for item in given:
        key, _, value = item.partition("=")
        yield key.strip(), value.strip()


def refuse_tensorrt(given: Iterable[str], engine: str) -> None:
    """Refuse keys of the TensorRT builder for a package of another engine.

    Raises:
        ConfigError: there is one.
    """
    for key, _ in items(given):
        if key.startswith("build.tensorrt.") and engine != "tensorrt":
            raise ConfigError(f"{key} must go with --engine tensorrt (got {engine})")
