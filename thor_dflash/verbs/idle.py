"""Refuses a --set that has no effect on a command. A configuration file may hold it for others."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from thor_dflash.errors import ConfigError

_ON_GPU = ("cuda", "tensorrt")
READ_BY: Mapping[str, tuple[str, ...]] = {
    "engine.device": _ON_GPU,
    "engine.graphs": _ON_GPU,
    "engine.overlap": ("cuda",),
    "engine.cubins": _ON_GPU,
}
"""Keys that not every engine reads, and the engines that do."""


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


def refuse_engine(given: Iterable[str], engines: Collection[str]) -> None:
    """Refuse keys that none of these engines reads.

    Raises:
        ConfigError: there is one.
    """
    for key, _ in items(given):
        known = READ_BY.get(key, tuple(engines))
        if not set(known) & set(engines):
            got = " and ".join(sorted(set(engines)))
            raise ConfigError(f"{key} must go with engine {' or '.join(known)} (got {got})")
