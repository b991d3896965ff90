"""`<step>.plan.json`: the description of a TensorRT engine, stored next to the engine file.

Builders write it and the runtime reads it; this file is all they share. An engine works only with
the TensorRT version and the device that it was built with. Both are recorded, so that a mismatch is
reported before TensorRT fails with a less clear message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from thor_dflash.core import strict_records
from thor_dflash.core.errors import PackageError
from thor_dflash.package.launch_program import Value, Weight

ENDING = ".plan.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildEnvironment:
    """What an engine was built with."""

    tensorrt: str
    """Version, such as "10.13.3.9"."""
    capability: tuple[int, int]
    """Compute capability of the device."""
    device: str
    """Name of the device."""
    multiprocessors: int
    """Multiprocessors of the device."""
    kernels: str
    """`plugins.tensorrt.node.fingerprint()`: a hash of the sources that the plugins launch."""
    options: Mapping[str, str] = field(default_factory=dict[str, str])
    """Builder options, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginCall:
    """One plugin of an engine."""

    name: str
    """Name of its layer."""
    op: str
    fields: Mapping[str, int | float | str]
    """`plugins.tensorrt.node.Node.fields()`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDescription:
    """One graph as a TensorRT engine. Every tensor that the engine binds is an input, an output or
    a weight; weights are bound like inputs, so that all engines of a package share one copy.
    """

    name: str
    """Name of the graph."""
    file: str
    """The engine file in the package. Graphs may share one."""
    sha256: str
    """Hash of the file."""
    profile: int
    """Index of the engine's optimisation profile for this graph."""
    inputs: Mapping[str, Value]
    """A size that a session decides (rows of a cache) is a name."""
    outputs: Mapping[str, Value]
    weights: Mapping[str, Weight]
    """Engine tensor -> its contents. uint8 [n] is bound as int32 [n / 4]."""
    in_place: tuple[str, ...] = ()
    """Outputs that overwrite the input whose next value they are."""
    nodes: tuple[PluginCall, ...]
    """Every plugin in the engine file, once."""
    made: BuildEnvironment
    tactics: Mapping[str, str] = field(default_factory=dict[str, str])
    """Layer -> the tactic that TensorRT chose; for information only."""


def render(plan: EngineDescription) -> str:
    """The text of a .plan.json file."""
    return json.dumps(strict_records.encode(plan), indent=1) + "\n"


def read(package: Path, name: str) -> EngineDescription:
    """Read the description of one engine of a package.

    Raises:
        PackageError: it is missing, or not as this version writes it.
    """
    return strict_records.load(EngineDescription, package / f"{name}{ENDING}", PackageError)
