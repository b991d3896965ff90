"""Traces a package of engine cuda: runs each step alone and reads its memory before and after."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Protocol

from thor_dflash.calib.check.reference_run import define
from thor_dflash.calib.check.trace_record import Outputs, TracedStep
from thor_dflash.core.tensors import Array
from thor_dflash.package.launch_program import Program, Step
from thor_dflash.plugins.contract import Attributes, Op
from thor_dflash.plugins.launch import CallSite
from thor_dflash.plugins.linear.unpack import unpack
from thor_dflash.plugins.registry import KERNELS
from thor_dflash.runtime.engines.protocol import Call

EXACT = 2e-5
"""Tolerance of the standard nodes, which copy or sum in float32."""


class SteppableEngine(Protocol):
    """An engine whose steps can be run one at a time."""

    def program(self, name: str) -> Program:
        """Return the program of a loaded graph."""
        ...

    def begin(self, call: Call) -> None:
        """Wait until everything that the host wrote is in device memory."""
        ...

    def site(self, call: Call, step: Step) -> CallSite:
        """Return a step's ports as they are bound."""
        ...

    def fetch(self, call: Call, step: Step, port: str) -> Array:
        """Read the current content of a port's memory."""
        ...

    def perform(self, call: Call, begin: int, end: int) -> None:
        """Run steps `begin` to `end`, exclusive, of the call's program, and wait for them."""
        ...

    def finish(self, call: Call) -> None:
        """Make the state that all steps have left the current one, as a run does."""
        ...


class CudaTracer:
    """See Tracer."""

    def __init__(self, engine: SteppableEngine) -> None:
        self._engine = engine

    def steps(self, call: Call) -> Iterator[TracedStep]:
        """See Tracer."""
        program = self._engine.program(call.graph.name)
        self._engine.begin(call)
        for at in range(len(program.steps)):
            yield self._seen(call, program, at)

    def _seen(self, call: Call, program: Program, at: int) -> TracedStep:
        step = program.steps[at]
        site = self._engine.site(call, step)
        left = _left(site.op, site.attributes, step, program)
        # Read before the step runs, which may overwrite its inputs in place.
        fetched = {p: self._engine.fetch(call, step, p) for p in step.ports if p not in left}
        self._engine.perform(call, at, at + 1)
        outputs = {port: self._engine.fetch(call, step, port) for port in left}
        names = step.ports
        return TracedStep(
            program.name,
            step.name,
            step.op,
            {names[p]: x for p, x in fetched.items() if names[p] not in program.weights},
            {names[p]: x for p, x in outputs.items()},
            {names[p]: p for p in outputs},
            partial(_define, site, fetched, outputs),
            tolerance(step.op),
        )


def _left(op: Op, a: Attributes, step: Step, program: Program) -> frozenset[str]:
    """Return the ports that a step writes: those whose values are no input, no weight and of no
    earlier step.
    """
    given = {*program.inputs, *program.weights}
    for earlier in program.steps:
        if earlier is step:
            break
        given |= set(earlier.ports.values())
    return frozenset(port for port, name in step.ports.items() if name not in given)


def _define(site: CallSite, fetched: Mapping[str, Array], outputs: Outputs) -> Outputs:
    """Evaluate the definition of a step; ports that only kernels have are left out."""
    x = dict(fetched)
    if "packed" in x:
        x |= unpack(site, x.pop("packed"), x.pop("scales"))
    op, a = site.op, site.attributes
    if op.name == "embed":
        a = Attributes({**a.values, "rows": len(outputs["rows"])})
    elif op.inputs:
        known = {port.name for port in op.inputs_of(a)}
        x = {port: value for port, value in x.items() if port in known}
    return define(op, x, a, outputs)


def tolerance(op: str) -> float:
    """Return the tolerance that the operator's launch rule claims; see its docstring."""
    if not KERNELS[op].op.inputs:
        return EXACT
    found: object = vars(importlib.import_module(f"thor_dflash.plugins.{op}.launch"))["TOLERANCE"]
    assert isinstance(found, float)
    return found
