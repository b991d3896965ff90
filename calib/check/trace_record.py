"""A record of one operator as an engine ran it, and the interface of tracers that make it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from thor_dflash.core.tensors import Array
from thor_dflash.runtime.engines.protocol import Call

Outputs = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class TracedStep:
    """One step of a graph: its inputs, its outputs, and its outputs by the definition."""

    graph: str
    step: str
    """The ONNX node's name."""
    op: str
    inputs: Outputs
    """Value name -> input, without weights."""
    outputs: Outputs
    """Value name -> output."""
    ports: Mapping[str, str]
    """Value name of an output -> its port."""
    define: Callable[[], Outputs]
    """Evaluates the definition, in float64, for the same inputs and weights: port -> output."""
    tolerance: float
    """Largest error of a float output, as a share of its largest value."""


class StepTracer(Protocol):
    """Runs a call step by step."""

    def steps(self, call: Call) -> Iterator[TracedStep]:
        """Yield each step after it has run, in order. Kernels may change state in place: nothing
        may be decoded from that state afterwards.
        """
        ...
