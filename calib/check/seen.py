"""One operator as an engine ran it, and whoever can show that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from thor_dflash.runtime.engine import Call
from thor_dflash.tensors import Array

Outputs = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Seen:
    """One step of one graph: what it read, what it left, what it should have left."""

    graph: str
    step: str
    """The ONNX node's name."""
    room: str
    inputs: Outputs
    """Value name -> what the step read; no weights."""
    outputs: Outputs
    """Value name -> what it left."""
    ports: Mapping[str, str]
    """Value name of an output -> its port."""
    define: Callable[[], Outputs]
    """Port -> what the definition, in float64, makes of the same inputs and weights."""
    tolerance: float
    """Largest error of a float output, as a share of its largest value."""


class Tracer(Protocol):
    """Runs a call step by step."""

    def steps(self, call: Call) -> Iterator[Seen]:
        """Each step after it has run, in order. State that a kernel writes in place moves on;
        nothing may be decoded from there.
        """
        ...
