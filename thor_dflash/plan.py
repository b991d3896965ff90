"""`<step>.plan.json`: what a TensorRT engine of the package is, beside the engine itself.

Builders write it, the runtime reads it; this file is all they share. An engine works on the
TensorRT and the device it was built with and nowhere else, so both are written down, and whoever
loads it can say what does not fit before TensorRT says something less clear.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from thor_dflash import records
from thor_dflash.errors import PackageError
from thor_dflash.program import Value, Weight

ENDING = ".plan.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What an engine was built with."""

    tensorrt: str
    """Version, as "10.13.3.9"."""
    capability: tuple[int, int]
    """Compute capability of the device."""
    device: str
    """Name of the device."""
    multiprocessors: int
    """Of the device."""
    kernels: str
    """`plugins.tensorrt.node.fingerprint()`: the sources the plugins launch, hashed."""
    options: Mapping[str, str] = field(default_factory=dict[str, str])
    """Builder options, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanNode:
    """One plugin of an engine."""

    name: str
    """Of its layer."""
    room: str
    fields: Mapping[str, int | float | str]
    """`plugins.tensorrt.node.Node.fields()`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One graph as a TensorRT engine. Every tensor the engine binds is an input, an output or a
    weight; weights are bound like inputs, so all engines of a package share one copy of them.
    """

    name: str
    """The graph."""
    file: str
    """The engine, in the package. Graphs may share one."""
    sha256: str
    """Of the file."""
    profile: int
    """Which of the engine's optimisation profiles."""
    inputs: Mapping[str, Value]
    """A size that a session decides (rows of a cache) is a letter."""
    outputs: Mapping[str, Value]
    weights: Mapping[str, Weight]
    """Engine tensor -> what is in it. uint8 [n] is bound as int32 [n / 4]."""
    in_place: tuple[str, ...] = ()
    """Outputs that lie over the input they are the next value of."""
    nodes: tuple[PlanNode, ...]
    """Every plugin of the file's engine, once."""
    made: Made
    tactics: Mapping[str, str] = field(default_factory=dict[str, str])
    """Layer -> what TensorRT chose, for the record."""


def render(plan: Plan) -> str:
    """The text of a plan's description."""
    return json.dumps(records.encode(plan), indent=1) + "\n"


def read(package: Path, name: str) -> Plan:
    """The description of one engine of a package.

    Raises:
        PackageError: it is missing or not as this version writes it.
    """
    return records.load(Plan, package / f"{name}{ENDING}", PackageError)
