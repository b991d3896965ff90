"""An engine that runs the CUDA engine's programs without a device: tensors are numpy arrays, and
every step is computed by its operator's reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from thor_dflash.core.tensors import Array, Dims, DType, TensorSpec
from thor_dflash.package.launch_program import Program, Step, read
from thor_dflash.plugins.contract import NEXT, Attributes
from thor_dflash.plugins.launch import CallSite, Shaped
from thor_dflash.plugins.linear.unpack import unpack
from thor_dflash.plugins.registry import KERNELS
from thor_dflash.runtime.engines.protocol import Call, Graph, Tensor

Spoil = Callable[[Step, dict[str, Array]], None]
"""May change the outputs of a step, given by port, before later steps read them."""


@dataclass(eq=False)
class NumpyTensor:
    spec: TensorSpec
    array: Array


@dataclass(eq=False)
class Loaded:
    name: str
    program: Program
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]


@dataclass
class Stepping:
    """Implements the protocols `Engine` and `SteppableEngine`."""

    package: Path
    spoil: Spoil = lambda step, outputs: None
    programs: dict[str, Program] = field(default_factory=dict)
    unpacked: dict[str, dict[str, Array]] = field(default_factory=dict)
    values: dict[int, dict[str, Array]] = field(default_factory=dict)
    """id of a call -> the values that its steps have made so far."""

    @property
    def device(self) -> str:
        return "numpy"

    def load(self, name: str) -> Graph:
        program = self.programs[name] = read(self.package, name)
        return Loaded(
            name,
            program,
            {n: v.spec(n) for n, v in program.inputs.items()},
            {n: v.spec(n) for n, v in program.outputs.items()},
        )

    @property
    def loads_late(self) -> bool:
        return True

    def empty(self, spec: TensorSpec, dims: Dims) -> Tensor:
        bound = TensorSpec(spec.name, spec.dtype, spec.at(dims))
        return NumpyTensor(bound, np.zeros(bound.at({}), bound.dtype.numpy))

    def prepare(self, calls: Sequence[Call]) -> None: ...

    def run(self, calls: Sequence[Call]) -> None:
        for call in calls:
            self.begin(call)
            self.perform(call, 0, len(self.program(call.graph.name).steps))
            self.finish(call)

    def write(self, tensor: Tensor, values: Array) -> None:
        memory(tensor).array[tuple(slice(n) for n in values.shape)] = values

    def clear(self, tensor: Tensor) -> None:
        memory(tensor).array.fill(0)

    def read(self, tensor: Tensor, shape: tuple[int, ...] | None = None) -> Array:
        array = memory(tensor).array
        return array[tuple(slice(n) for n in shape or array.shape)].copy()

    def busy(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None: ...

    # ---- one step at a time

    def program(self, name: str) -> Program:
        return self.programs[name]

    def begin(self, call: Call) -> None:
        self.values[id(call)] = {}

    def site(self, call: Call, step: Step) -> CallSite:
        program, tensors = self.program(call.graph.name), {**call.inputs, **call.outputs}
        ports: dict[str, Shaped] = {}
        for port, name in step.ports.items():
            found = program.weights.get(name) or program.values.get(name)
            if found is not None:
                shape = tuple(int(n) for n in found.shape)
                ports[port] = Shaped(DType(found.dtype), shape)
            else:
                ports[port] = Shaped(tensors[name].spec.dtype, tensors[name].spec.at({}))
        return CallSite(KERNELS[step.op].op, Attributes(step.attributes), ports)

    def fetch(self, call: Call, step: Step, port: str) -> Array:
        name, program = step.ports[port], self.program(call.graph.name)
        if name in program.weights:
            weight = program.weights[name]
            raw = np.fromfile(
                self.package / weight.file, np.uint8, weight.nbytes, offset=weight.offset
            )
            return raw.view(DType(weight.dtype).numpy).reshape(weight.shape)
        made = self.values[id(call)]
        if name in made:
            return made[name]
        if name in call.inputs:
            return memory(call.inputs[name]).array.copy()
        shaped = self.site(call, step).ports[port]  # slabs and the like, which only kernels make
        return np.zeros(shaped.shape, shaped.dtype.numpy)

    def perform(self, call: Call, begin: int, end: int) -> None:
        for step in self.program(call.graph.name).steps[begin:end]:
            self._perform(call, step)

    def finish(self, call: Call) -> None:
        for name, tensor in call.outputs.items():
            memory(tensor).array[...] = self.values[id(call)][name]

    def _perform(self, call: Call, step: Step) -> None:
        site = self.site(call, step)
        x = {port: self.fetch(call, step, port) for port, name in step.ports.items()}
        if "packed" in x:
            key = step.ports["packed"]
            if key not in self.unpacked:
                self.unpacked[key] = unpack(site, x["packed"], x["scales"])
            x |= self.unpacked[key]
        a = site.attributes
        if site.op.inputs:
            known = {port.name for port in site.op.inputs_of(a)}
            x = {port: value for port, value in x.items() if port in known}
        elif "rows" in x and site.op.name == "embed":
            a = Attributes({**a.values, "rows": len(x["rows"])})
        if site.op.name == "concat":
            del x["y"]
        outputs = {p: v for p, v in site.op.reference(x, a).items() if p in step.ports}
        self.spoil(step, outputs)
        for port, value in outputs.items():
            shaped = site.ports[port]
            made = value.astype(shaped.dtype.numpy)
            name = step.ports[port]
            self.values[id(call)][name] = made
            if port in KERNELS[step.op].in_place and name.startswith(NEXT):
                memory(call.inputs[name.removeprefix(NEXT)]).array[...] = made


def memory(tensor: Tensor) -> NumpyTensor:
    assert isinstance(tensor, NumpyTensor)
    return tensor
