"""Runs the steps of the CUDA engine one at a time, or some at a time."""

from __future__ import annotations

import numpy as np

from thor_dflash.core.tensors import Array, DType
from thor_dflash.package.launch_program import Program, Step
from thor_dflash.plugins.contract import Attributes
from thor_dflash.plugins.launch import CallSite, Shaped
from thor_dflash.plugins.registry import KERNELS
from thor_dflash.runtime.engines.cuda.engine import CudaEngine
from thor_dflash.runtime.engines.cuda.graph_capture import CapturedGraph
from thor_dflash.runtime.engines.protocol import Call


class StepRunner:
    """See SteppableEngine."""

    def __init__(self, engine: CudaEngine) -> None:
        self._engine = engine
        self._captured: dict[tuple[Call, int, int], CapturedGraph] = {}

    def program(self, name: str) -> Program:
        """See SteppableEngine."""
        return self._engine.program(name)

    def site(self, call: Call, step: Step) -> CallSite:
        """See SteppableEngine."""
        ports = {port: self._shaped(call, name) for port, name in step.ports.items()}
        return CallSite(KERNELS[step.op].op, Attributes(step.attributes), ports)

    def _shaped(self, call: Call, name: str) -> Shaped:
        program = self._engine.program(call.graph.name)
        if name in program.weights:
            weight = program.weights[name]
            return Shaped(DType(weight.dtype), weight.shape)
        if name in program.values:
            spec = program.values[name].spec(name)
        else:
            spec = (call.outputs if name in call.outputs else call.inputs)[name].spec
        return Shaped(spec.dtype, spec.at({}))

    def fetch(self, call: Call, step: Step, port: str) -> Array:
        """See SteppableEngine."""
        shaped = self._shaped(call, step.ports[port])
        out = np.empty(shaped.shape, shaped.dtype.numpy)
        address = self._engine.place(call, step, port)
        self._engine.driver.synchronize()
        self._engine.driver("cuMemcpyDtoH", out.ctypes.data, address, out.nbytes)
        return out

    def begin(self, call: Call) -> None:
        """See SteppableEngine."""
        # A read flushes pending writes of the host and waits for them.
        smallest = min(call.inputs.values(), key=lambda tensor: tensor.spec.nbytes({}))
        self._engine.read(smallest)

    def perform(self, call: Call, begin: int, end: int) -> None:
        """See SteppableEngine. Captures the steps the first time."""
        engine, key = self._engine, (call, begin, end)
        if key not in self._captured:
            steps = self.program(call.graph.name).steps[begin:end]
            self._captured[key] = engine.excerpt([call], lambda one: any(one is s for s in steps))
        # The state may have moved since the capture, and the host may have written.
        engine.tensors.show_places(engine.replay.bound[call].touched)
        engine.tensors.flush()
        self._captured[key].start()
        engine.driver.synchronize()

    def finish(self, call: Call) -> None:
        """See SteppableEngine."""
        self._engine.replay.bound[call].swap()
