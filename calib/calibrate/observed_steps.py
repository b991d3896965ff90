"""Runs a package's graph on its own engine and yields what each observed step receives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from thor_dflash.calib.calibrate.activations import OBSERVED
from thor_dflash.calib.check.cuda_trace import SteppableEngine
from thor_dflash.core.tensors import Array
from thor_dflash.package.launch_program import Program
from thor_dflash.plugins.contract import Attributes, Op
from thor_dflash.plugins.registry import KERNELS
from thor_dflash.runtime.engines.protocol import Call


@dataclass(frozen=True, slots=True)
class ObservedStep:
    """A step of an observed operator."""

    name: str
    op: Op
    attributes: Attributes
    rows: Mapping[str, Array]
    """Port -> the rows that it received, [T, width]."""
    weights: Mapping[str, str]
    """Port -> name of a weight; see StepObserver."""


class StepObserver(Protocol):
    """Runs calls on an engine."""

    @property
    def weights(self) -> Mapping[str, Array]:
        """Name -> the norms of the observed steps so far."""
        ...

    def run(self, call: Call) -> Iterator[ObservedStep]:
        """Yield the observed steps of a call. Once exhausted, the call has run as by the engine."""
        ...


class ProgramObserver:
    """See StepObserver; of engine cuda. Reads the inputs of a step after all steps before it."""

    def __init__(self, engine: SteppableEngine) -> None:
        self._engine = engine
        self.weights: dict[str, Array] = {}

    def run(self, call: Call) -> Iterator[ObservedStep]:
        """See StepObserver."""
        engine, done = self._engine, 0
        program = engine.program(call.graph.name)
        engine.begin(call)
        for at, step in enumerate(program.steps):
            if KERNELS[step.op].op.type in OBSERVED:
                if at > done:
                    engine.perform(call, done, at)
                yield self._seen(call, program, at)
                done = at
        engine.perform(call, done, len(program.steps))
        engine.finish(call)

    def _seen(self, call: Call, program: Program, at: int) -> ObservedStep:
        step = program.steps[at]
        op, ports = OBSERVED[KERNELS[step.op].op.type]
        given = {port: step.ports[port] for port in ports if port in step.ports}
        weights = {port: name for port, name in given.items() if name in program.weights}
        for port, name in weights.items():
            if name not in self.weights:
                self.weights[name] = self._engine.fetch(call, step, port)
        rows = {p: self._engine.fetch(call, step, p) for p in given if p not in weights}
        return ObservedStep(step.name, op, Attributes(step.attributes), rows, weights)
