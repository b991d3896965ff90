"""`<step>.program.json`: a graph as a list of operator calls, for engines that launch the kernels.

Builders write it from the ONNX graph and the runtime reads it; this file is all they share. A
program lists which operator runs on which values, in order, and the offset of each intermediate
value in the step's scratch memory. It has no launch grids, because those depend on the device.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from thor_dflash.core import strict_records
from thor_dflash.core.errors import PackageError
from thor_dflash.core.tensors import DType, TensorSpec

ENDING = ".program.json"
ALIGNMENT = 256
"""Alignment of every value in scratch memory, bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """An edge of the graph. A size that a session decides (rows of a cache) is a name."""

    dtype: str
    """A value of DType."""
    shape: tuple[int | str, ...]
    offset: int = -1
    """Offset in the step's scratch memory, bytes; -1 for inputs and outputs."""

    def spec(self, name: str) -> TensorSpec:
        """This value as a TensorSpec."""
        return TensorSpec(name, DType(self.dtype), self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A constant, and where it is in the package."""

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
    """One call of an operator, or of one of the standard kernels."""

    name: str
    op: str
    attributes: Mapping[str, int | float | str]
    ports: Mapping[str, str]
    """Port -> name of a value, weight, input or output."""


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
    """Size of the memory for `values`, bytes."""


def render(program: Program) -> str:
    """The text of a program file."""
    return json.dumps(strict_records.encode(program), indent=1) + "\n"


def read(package: Path, name: str) -> Program:
    """Read a program of a package.

    Raises:
        PackageError: it is missing, or not as this version writes it.
    """
    return strict_records.load(Program, package / f"{name}{ENDING}", PackageError)
