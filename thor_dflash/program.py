"""`<step>.program.json`: a graph as a launch list, for engines that walk it themselves.

Builders write it from the ONNX graph, the runtime reads it; this file is all they share. A program
says which room runs on which values, in order, and where each value that lives inside the step
lies in the step's scratch memory. It says nothing of grids: those depend on the device.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from thor_dflash import records
from thor_dflash.errors import PackageError
from thor_dflash.tensors import DType, TensorSpec

ENDING = ".program.json"
ALIGNMENT = 256
"""Of every value in scratch memory, bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """An edge. A size that a session decides (rows of a cache) is a letter."""

    dtype: str
    """As DType names it."""
    shape: tuple[int | str, ...]
    offset: int = -1
    """In the step's scratch memory, bytes; -1 for inputs, outputs and weights."""

    def spec(self, name: str) -> TensorSpec:
        """As the engine protocol describes tensors."""
        return TensorSpec(name, DType(self.dtype), self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A constant, and where the package holds it."""

    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    """Bytes."""

    @property
    def nbytes(self) -> int:
        """Size, bytes."""
        size = DType(self.dtype).bytes
        for n in self.shape:
            size *= n
        return size


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One call of a room, or of one of the standard kernels."""

    name: str
    room: str
    attributes: Mapping[str, int | float | str]
    ports: Mapping[str, str]
    """Port -> value, weight, input or output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One graph."""

    name: str
    inputs: Mapping[str, Value]
    outputs: Mapping[str, Value]
    values: Mapping[str, Value]
    weights: Mapping[str, Weight]
    steps: tuple[Step, ...]
    scratch: int
    """Memory of `values`, bytes."""


def render(program: Program) -> str:
    """The text of a program file."""
    return json.dumps(records.encode(program), indent=1) + "\n"


def read(package: Path, name: str) -> Program:
    """A program of a package.

    Raises:
        PackageError: it is missing or not as this version writes it.
    """
    return records.load(Program, package / f"{name}{ENDING}", PackageError)
