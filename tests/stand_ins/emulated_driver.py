"""A fake of CUDA's driver that runs kernels on the emulator, in host memory.

The engine above it is the real one: it counts, allocates and fills memory, captures and replays
graphs. A launch may access only what its arguments point at, with the sizes that the program gives.
The outputs and the scratch of a step are filled with poison just before the first of its launches
that gets them. So a value that is never written, or that lies where another one is still needed,
shows as NaN where it is read.
"""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from emulator import compiler, runner
from emulator.runner import Memory, is_early
from stand_ins.fake_driver import FACTS, MEMORY, OK, FakeCuda
from support.kernel_runner import POISON

from thor_dflash.core.tensors import Array
from thor_dflash.package.launch_program import Program, Step
from thor_dflash.plugins.contract import NEXT
from thor_dflash.plugins.cuda import driver, enqueue, kernel_cache
from thor_dflash.plugins.cuda.compile import Cubin
from thor_dflash.plugins.launch import (
    BufferOffset,
    Device,
    Launch,
    Pointer,
    PointerTable,
    Scratch,
    Table,
)
from thor_dflash.plugins.registry import KERNELS
from thor_dflash.runtime.engines.cuda import binding, engine
from thor_dflash.runtime.engines.protocol import Call

ALIGNMENT = 1024
KINDS = {"pointer": ctypes.c_void_p, "int": ctypes.c_int32, "real": ctypes.c_float}
OVERLAP = FakeCuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


@dataclass(frozen=True, slots=True)
class LaunchPort:
    """What a program says about one port of one step."""

    nbytes: int
    weight: bool
    made: bool
    """Whether this step writes it."""
    kept: bool
    """Whether it is the next value of a state that the step updates in place."""


@dataclass(frozen=True, slots=True)
class Meant:
    """What a launch that the engine has bound belongs to."""

    step: Step
    begins: frozenset[str]
    """Names of ports and scratch that this is the step's first launch to get."""
    ports: dict[str, LaunchPort]


def meanings(
    program: Program, nbytes: dict[str, int]
) -> Iterator[tuple[Step, dict[str, LaunchPort]]]:
    """Every step and its ports. `nbytes`: value -> bytes. A value is made by the first step that
    names it; a state that is updated in place by every step that has it as an output.
    """
    known = {*program.inputs, *program.weights}
    for step in program.steps:
        rule, ports = KERNELS[step.op], {}
        for port, name in step.ports.items():
            kept = port in rule.in_place and name.startswith(NEXT)
            weight = name in program.weights
            ports[port] = LaunchPort(nbytes[name], weight, kept or name not in known, kept)
        known |= set(step.ports.values())
        yield step, ports


def names(launch: Launch) -> set[str]:
    """Names of the ports and scratch of a launch."""
    found: set[str] = set()
    for argument in launch.arguments:
        match argument:
            case Pointer(name) | Scratch(name):
                found.add(name)
            case PointerTable(ports):
                found |= set(ports)
            case _:
                pass
    return found


@dataclass(slots=True)
class Work:
    """An enqueued launch: kernel, arguments, and the memory that it may access."""

    source: Path
    defines: dict[str, int]
    kernel: str
    grid: tuple[int, int, int]
    threads: int
    shared: int
    cluster: int
    arguments: list[Any]
    memory: list[Memory]
    poisoned: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Address and bytes of what is filled with poison before it runs."""
    logits: tuple[int, int] | None = None
    """Address and bytes of the logits, if it is a head's product."""
    zeroed: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Address and bytes of what must be zero after it."""
    shifts: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    """For a state that alternates between two buffers: the address passed as an argument -> address
    of its shift (see launch.Shift), and the shift's sign: 1 for an input, -1 for an output.
    """

    def run(self) -> None:
        """Run it on this CPU."""
        for address, nbytes in self.poisoned:
            ctypes.memset(self._now(address), POISON, nbytes)
        memory = [replace(one, address=self._now(one.address)) for one in self.memory]
        runner.run(
            self.source, self.defines, self.kernel, self.grid, self.threads, self.shared,
            self.arguments, memory, cluster=self.cluster,
        )  # fmt: skip
        for address, nbytes in self.zeroed:
            assert not any(ctypes.string_at(address, nbytes)), f"{self.kernel}: zero no more"

    def _now(self, address: int) -> int:
        """The address that an argument's address stands for in this run."""
        word, sign = self.shifts.get(address, (0, 0))
        return address + sign * ctypes.c_int64.from_address(word).value if word else address


@dataclass(frozen=True, slots=True)
class Back:
    """A copy to the host that is part of a graph."""

    to: int
    at: int
    nbytes: int


class EmulatedCuda(FakeCuda):
    """The driver described at the top of this file."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        major, minor = device.capability
        facts = {"COMPUTE_CAPABILITY_MAJOR": major, "COMPUTE_CAPABILITY_MINOR": minor,
                 "MULTIPROCESSOR_COUNT": device.multiprocessors,
                 "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": device.shared}  # fmt: skip
        named = {f"CU_DEVICE_ATTRIBUTE_{name}": value for name, value in facts.items()}
        self.CUdevice_attribute = SimpleNamespace(**FACTS | named)
        self.meant: dict[int, Meant] = {}
        """By id of the launch."""
        self._held: dict[int, Any] = {}
        """What a handle of a module or graph stands for."""
        self.bounds: list[binding.BoundProgram] = []
        self.ran: list[Work] = []
        """All launches that ran, in order."""
        self.logits: list[bytes] = []
        """Logits of each head of the last graph, in order."""
        self._memory: list[Array] = []
        self._graph: list[Work | Back] | None = None
        self._given: list[tuple[int, bytes]] = []
        """Copies to the host made by graphs: address and bytes. They are put into the host's memory
        only when it waits for an event."""
        self._next: tuple[Launch, Sequence[int | float]] | None = None
        self._written: set[int] = set()
        """Addresses of what may have been written by the last launch that could not overlap earlier
        ones, and by those since."""

    # ---- functions of the engine that are intercepted ------------------------------------------
    def bind(self, call: Call, program: Program, device: Device) -> binding.BoundProgram:
        """Call the engine's own function and note what each launch belongs to."""
        made = binding.bind(call, program, device)
        self.bounds.append(made)
        specs = {n: v.spec(n) for n, v in program.values.items()}
        specs |= {n: t.spec for n, t in (*call.inputs.items(), *call.outputs.items())}
        sizes = {n: w.nbytes for n, w in program.weights.items()}
        sizes |= {n: spec.nbytes({}) for n, spec in specs.items()}
        ports = {id(step): found for step, found in meanings(program, sizes)}
        seen: dict[int, set[str]] = {}
        for one in made.launches:
            step, launch = one.step, one.launch
            before = seen.setdefault(id(step), set())
            self.meant[id(launch)] = Meant(step, frozenset(names(launch) - before), ports[id(step)])
            before |= names(launch)
        return made

    def enqueue(
        self, gate: Any, stream: Any, kernel: Any, launch: Launch, given: Any, *, overlap: bool
    ) -> None:
        """Note the launch and its arguments, then call the engine's own function."""
        self._next = launch, [value for _, value in given]
        enqueue.enqueue(gate, stream, kernel, launch, given, overlap=overlap)

    # ---- the driver ----------------------------------------------------------------------------
    def cuMemAlloc(self, nbytes: int) -> Any:  # noqa: N802
        raw = np.full(nbytes + ALIGNMENT, POISON, np.uint8)
        self._memory.append(raw)
        self.taken += nbytes
        assert self.taken <= MEMORY
        return OK, raw.ctypes.data + -raw.ctypes.data % ALIGNMENT

    def cuMemFree(self, address: int) -> Any:  # noqa: N802
        return (OK,)  # kept until the context ends

    def cuMemsetD8(self, to: int, value: int, count: int) -> Any:  # noqa: N802
        ctypes.memset(to, value, count)
        return (OK,)

    def cuMemsetD8Async(self, to: int, value: int, count: int, stream: int) -> Any:  # noqa: N802
        assert self._graph is None
        ctypes.memset(to, value, count)
        return self._on(stream)

    def cuMemcpyHtoD(self, to: int, at: int, nbytes: int) -> Any:  # noqa: N802
        ctypes.memmove(to, at, nbytes)
        return (OK,)

    def cuMemcpyHtoDAsync(self, to: int, at: int, nbytes: int, stream: int) -> Any:  # noqa: N802
        assert self._graph is None
        ctypes.memmove(to, at, nbytes)
        return self._on(stream)

    def cuMemcpyDtoHAsync(self, to: int, at: int, nbytes: int, stream: int) -> Any:  # noqa: N802
        if self._graph is None:
            return self.cuMemcpyHtoDAsync(to, at, nbytes, stream)
        self._graph.append(Back(to, at, nbytes))
        return self._on(stream)

    def cuEventRecordWithFlags(self, event: Any, stream: int, flags: int) -> Any:  # noqa: N802
        assert self._graph is not None, "an external event outside of a capture"
        return self._on(stream)

    def cuEventSynchronize(self, event: Any) -> Any:  # noqa: N802
        for to, data in self._given:
            ctypes.memmove(to, data, len(data))
        self._given.clear()
        return (OK,)

    def cuModuleLoadData(self, image: bytes) -> Any:  # noqa: N802
        module = self._new("cuModuleUnload")
        self._held[module] = pickle.loads(image)
        return OK, module

    def cuModuleGetFunction(self, module: int, name: bytes) -> Any:  # noqa: N802
        return OK, (*self._held[module], name.decode())

    def cuStreamBeginCapture(self, stream: Any, mode: Any) -> Any:  # noqa: N802
        self._graph = []
        return self._on(stream)

    def cuStreamEndCapture(self, stream: Any) -> Any:  # noqa: N802
        made, self._graph = self._graph, None
        assert made is not None
        self.graphs.append(len(made))
        graph = self._new("cuGraphDestroy")
        self._held[graph] = made
        return OK, graph

    def cuGraphInstantiate(self, graph: int, flags: int) -> Any:  # noqa: N802
        executable = self._new("cuGraphExecDestroy")
        self._held[executable] = self._held[graph]
        return OK, executable

    def cuGraphLaunch(self, graph: int, stream: int) -> Any:  # noqa: N802
        self.logits.clear()
        for work in self._held[graph]:
            if isinstance(work, Back):
                self._given.append((work.to, ctypes.string_at(work.at, work.nbytes)))
                ctypes.memset(work.to, POISON, work.nbytes)
            else:
                self._run(work)
        return self._on(stream)

    def cuLaunchKernelEx(self, config: Any, kernel: Any, arguments: Any, extra: Any) -> Any:  # noqa: N802
        assert self._next is not None
        launch, values = self._next
        attributes = {one.id: one.value for one in config.attrs}
        source, defines, name = kernel
        kinds = compiler.signatures(source, defines)[name]
        pointers = (ctypes.c_void_p * len(kinds)).from_address(arguments)
        given = [KINDS[kind].from_buffer_copy(KINDS[kind].from_address(at or 0))
                 for kind, at in zip(kinds, pointers, strict=True)]  # fmt: skip
        assert len(values) == len(kinds), f"{name}: {len(values)} arguments"
        work = Work(
            source, defines, name, (config.gridDimX, config.gridDimY, config.gridDimZ),
            config.blockDimX, config.sharedMemBytes, launch.cluster, given, [],
        )  # fmt: skip
        assert (4 in attributes) == (launch.cluster > 1)
        if OVERLAP not in attributes:
            self._written.clear()
        self._reach(work, self.meant[id(launch)], launch, values, OVERLAP in attributes)
        self._written |= {memory.address for memory in work.memory if memory.writable}
        if self._graph is None:
            self._run(work)
        else:
            self._graph.append(work)
        return self._on(config.hStream)

    def cuCtxDestroy(self, context: Any) -> Any:  # noqa: N802
        self._memory.clear()
        return (OK,)

    # ---- what a launch may access --------------------------------------------------------------
    def _run(self, work: Work) -> None:
        work.run()
        self.ran.append(work)
        if work.logits:
            self.logits.append(ctypes.string_at(*work.logits))

    def _reach(
        self, work: Work, meant: Meant, launch: Launch, values: Sequence[Any], overlap: bool
    ) -> None:
        for argument, value in zip(launch.arguments, values, strict=True):
            match argument:
                case Pointer(port):
                    self._port(work, meant, port, value, overlap)
                case PointerTable(ports):
                    work.memory.append(Memory(value, 8 * len(ports), writable=False))
                    table = np.frombuffer(ctypes.string_at(value, 8 * len(ports)), np.uint64)
                    for port, target in zip(ports, table.tolist(), strict=True):
                        self._port(work, meant, port, target, overlap)
                case Scratch():
                    self._scratch(work, meant, argument, value, overlap)
                case BufferOffset(ports):
                    self._shift(work, launch, values, ports, value)
                case Table():
                    work.memory.append(Memory(value, argument.values.nbytes, writable=False))
                case _:
                    pass

    def _shift(
        self, work: Work, launch: Launch, values: Sequence[Any], ports: Sequence[str], word: int
    ) -> None:
        """Note the states that one Shift applies to; `word`: its address."""
        work.memory.append(Memory(word, 8, writable=False))
        for argument, value in zip(launch.arguments, values, strict=True):
            if isinstance(argument, Pointer) and argument.port in ports and value:
                sign = -1 if argument.port.startswith("next_") else 1
                assert work.shifts.setdefault(value, (word, sign)) == (word, sign), argument

    def _scratch(self, work: Work, meant: Meant, wanted: Scratch, at: int, overlap: bool) -> None:
        work.memory.append(Memory(at, wanted.nbytes, True, overlap))
        if wanted.zeroed:
            work.zeroed.append((at, wanted.nbytes))
        elif wanted.name in meant.begins:
            work.poisoned.append((at, wanted.nbytes))

    def _port(self, work: Work, meant: Meant, port: str, at: int, overlap: bool) -> None:
        """Allow access to a port. A state updated in place comes by two ports but is one buffer."""
        if port not in meant.ports:
            assert at == 0, f"{meant.step.name}: {port} is left out"
            return
        found = meant.ports[port]
        if port == "logits" and found.made and work.kernel == "linear":
            work.logits = at, found.nbytes
        if found.made and not found.kept and port in meant.begins:
            work.poisoned.append((at, found.nbytes))
        writable = found.made
        early = is_early(work.kernel, port) and at not in self._written
        for other in [m for m in work.memory if m.address == at]:
            assert other.nbytes == found.nbytes, (meant.step.name, port)
            work.memory.remove(other)
            writable, early = writable or other.writable, early or other.early
        foreign = overlap and not found.weight
        work.memory.append(Memory(at, found.nbytes, writable, foreign, early))


def emulate(monkeypatch: pytest.MonkeyPatch, device: Device) -> EmulatedCuda:
    """Replace the driver by the emulator; a cubin then holds the path and constants of a source."""
    made = EmulatedCuda(device)

    def load(source: Path, defines: dict[str, int], *rest: object) -> Cubin:
        return Cubin(pickle.dumps((source.resolve(), dict(defines))), "")

    monkeypatch.setattr(driver, "_bindings", lambda: made)
    monkeypatch.setattr(kernel_cache, "load", load)
    monkeypatch.setattr(engine, "bind", made.bind)
    monkeypatch.setattr(engine, "enqueue", made.enqueue)
    return made
