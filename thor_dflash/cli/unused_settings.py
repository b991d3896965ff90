"""Refuses a --set that has no effect on a command. A configuration file may hold it for others."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from thor_dflash.core.errors import ConfigError

ON_GPU = ("cuda", "tensorrt")
READERS: Mapping[str, tuple[str, ...]] = {
    "engine.threads": ("ort",),
    "engine.device": ON_GPU,
    "engine.graphs": ON_GPU,
    "engine.overlap": ON_GPU,
    "engine.cubins": ON_GPU,
}
"""Keys that only some engines read -> these engines."""


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
        readers = READERS.get(key, ())
        if readers and not set(readers) & set(engines):
            got = " and ".join(sorted(set(engines)))
            raise ConfigError(f"{key} must go with engine {' or '.join(readers)} (got {got})")
