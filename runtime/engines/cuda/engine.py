"""The CUDA engine: programs walked once, captured, and replayed as one CUDA graph a step."""

# cuda-python publishes no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from thor_dflash.config import EngineConfig
from thor_dflash.plugins.cuda.compile import architecture, load
from thor_dflash.plugins.cuda.driver import Driver, Info
from thor_dflash.plugins.launch import Addresses, Launch, Scratch, Table
from thor_dflash.program import Program, Step, Weight, read
from thor_dflash.progress import Progress
from thor_dflash.runtime.engine import Call, Graph, Tensor
from thor_dflash.runtime.engines.cuda.bound import (
    Bound,
    CudaTensor,
    Places,
    Planned,
    Turn,
    bind,
    cuda,
    table,
    values,
)
from thor_dflash.runtime.engines.cuda.capture import Captured, Launcher
from thor_dflash.runtime.engines.cuda.control import RING, SLOT, SMALL, Page, Ring
from thor_dflash.runtime.engines.cuda.memory import Arena
from thor_dflash.runtime.engines.cuda.weights import Files, Filler
from thor_dflash.tensors import Array, Dims, TensorSpec

COMPILERS = 4
"""Kernels compiled at once."""

KINDS = {"attention": "cache", "drafter": "ring", "gdn": "state"}
"""First word of a state's name -> its line in the byte table."""


@dataclass(slots=True, eq=False)
class CudaGraph:
    """A program and its ports."""

    name: str
    program: Program
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]


class CudaEngine:
    """Programs of one package directory on one device.

    Memory is counted by `prepare` before any of it is taken: tensors made before it are only
    promises, and none can be made after it.
    """

    def __init__(
        self, package: Path, config: EngineConfig, progress: Progress, fill: Filler | None = None
    ) -> None:
        self.package = package
        self._config = config
        self._progress = progress
        self._fill = fill or Files(package, progress)
        self._driver = Driver(config.device)
        self._thread = threading.get_ident()
        self._graphs: dict[str, CudaGraph] = {}
        self._tensors: list[CudaTensor] = []
        self._bound: dict[int, Bound] = {}
        self._others: list[Call] = []
        self._captured: dict[tuple[int, ...], Captured] = {}
        self._arena = Arena()
        self._page_at = 0
        self._seconds: dict[str, float] = {}

    @property
    def info(self) -> Info:
        """The device."""
        return self._driver.info

    @property
    def memory(self) -> Mapping[str, int]:
        """What the engine holds on the device: kind -> bytes."""
        return dict(self._arena.sizes)

    def load(self, name: str) -> Graph:
        """See Engine."""
        if name not in self._graphs:
            program = read(self.package, name)
            inputs = {n: v.spec(n) for n, v in program.inputs.items()}
            outputs = {n: v.spec(n) for n, v in program.outputs.items()}
            self._graphs[name] = CudaGraph(name, program, inputs, outputs)
        return self._graphs[name]

    def empty(self, spec: TensorSpec, dims: Dims) -> Tensor:
        """See Engine."""
        assert not self._arena.base, f"{spec} made after prepare"
        tensor = CudaTensor(TensorSpec(spec.name, spec.dtype, spec.at(dims)))
        self._tensors.append(tensor)
        return tensor

    # ---- prepare -------------------------------------------------------------------------

    def prepare(self, calls: Sequence[Call]) -> None:
        """See Engine."""
        device = self._driver.info.device
        for call in (*calls, *self._others):
            graph = call.graph
            assert isinstance(graph, CudaGraph)
            self._bound[id(call)] = bind(call, graph.program, device)
        bounds = list(self._bound.values())
        self._take_turns(bounds)
        offsets = self._count(bounds)
        self._arena.check(self._driver.free_memory(), self._rows())
        base = self._arena.base = self._driver.allocate(self._arena.nbytes)
        self._driver("cuMemsetD8", base, 0, self._arena.nbytes)
        self._place(base, offsets)
        packed = {name: site for bound in bounds for name, site in bound.packed.items()}
        self._fill(self._driver, offsets.weights, self._places.weights, packed)
        self._launcher = Launcher(self._driver, self._compile(bounds), overlap=self._config.overlap)
        self._ring = Ring(self._driver, self._driver.pinned(RING))
        self._back = self._driver.pinned(RING)
        self._driver("cuCtxSynchronize")

    def _rows(self) -> int:
        """Rows of the key/value cache."""
        caches = [t.spec.at({})[1] for t in self._tensors if t.spec.name.startswith("attention.")]
        return max(caches, default=0)

    @staticmethod
    def _take_turns(bounds: Sequence[Bound]) -> None:
        """Tensors that the same calls renew change place together."""
        renewed: dict[int, list[int]] = {}
        tensors: dict[int, CudaTensor] = {}
        for at, bound in enumerate(bounds):
            for tensor in bound.swapped():
                renewed.setdefault(id(tensor), []).append(at)
                tensors[id(tensor)] = tensor
        turns: dict[tuple[int, ...], Turn] = {}
        for key, calls in renewed.items():
            tensors[key].turn = turns.setdefault(tuple(calls), Turn())
        for by, turn in turns.items():
            for at in by:
                bounds[at].turns.append(turn)

    def _count(self, bounds: Sequence[Bound]) -> Offsets:
        """Room for everything, in the order of the byte table."""
        take = self._arena.take
        weights: dict[str, Weight] = {}
        for bound in bounds:
            weights |= bound.program.weights
        found = Offsets(weights, {n: take("weights", w.nbytes) for n, w in weights.items()})
        page = 0
        for tensor in self._tensors:
            size = tensor.spec.nbytes({})
            if size <= SMALL and tensor.turn is None:
                tensor.control = page
                page += -(-size // SLOT) * SLOT
            else:
                kind = KINDS.get(tensor.spec.name.split(".")[0], "rows")
                tensor.places = [take(kind, size) for _ in range(2 if tensor.turn else 1)]
        found.page = take("rows", page)
        self._page = Page(page)
        found.values = take("scratch", max((b.program.scratch for b in bounds), default=0))
        found.working = take("scratch", max((b.working for b in bounds), default=0))
        for planned, launch in _launches(bounds):
            self._count_launch(found, planned, launch)
        return found

    def _count_launch(self, found: Offsets, planned: Planned, launch: Launch) -> None:
        for argument in launch.arguments:
            if isinstance(argument, Scratch) and argument.zeroed:
                key = id(planned.step), argument.name
                if key not in found.zeroed:
                    found.zeroed[key] = self._arena.take("scratch", argument.nbytes)
            elif isinstance(argument, Table):
                content = argument.values.tobytes()
                if content not in found.tables:
                    found.tables[content] = self._arena.take("tables", len(content))
            elif isinstance(argument, Addresses):
                # One for each way the tensors it points at can be turned.
                found.spare += [
                    self._arena.take("tables", 8 * len(argument.ports)) for _ in range(4)
                ]

    def _place(self, base: int, found: Offsets) -> None:
        """Offsets become addresses."""
        for tensor in self._tensors:
            if tensor.control >= 0:
                tensor.places = [base + found.page + tensor.control]
            else:
                tensor.places = [base + offset for offset in tensor.places]
        self._page_at = base + found.page
        self._places = Places(
            {name: base + offset for name, offset in found.weights_at.items()},
            base + found.values,
            base + found.working,
            {key: base + offset for key, offset in found.zeroed.items()},
            {content: base + offset for content, offset in found.tables.items()},
        )
        self._spare = iter([base + offset for offset in found.spare])
        for content, at in self._places.tables.items():
            self._driver(
                "cuMemcpyHtoD", at, np.frombuffer(content, np.uint8).ctypes.data, len(content)
            )

    def _compile(self, bounds: Sequence[Bound]) -> dict[tuple[object, ...], Any]:
        """Kernel of every launch, by what makes it: source, constants, name."""
        wanted: dict[tuple[object, ...], tuple[Path, Mapping[str, int]]] = {}
        shared: dict[tuple[object, ...], int] = {}
        for planned, launch in _launches(bounds):
            image = planned.source, tuple(sorted(launch.defines.items()))
            wanted[image] = planned.source, launch.defines
            kernel = (*image, launch.kernel)
            shared[kernel] = max(shared.get(kernel, 0), launch.shared)
        arch = architecture(self._driver.info.device.capability)
        directory = Path(self._config.cubins).expanduser()
        images: dict[tuple[object, ...], bytes] = {}
        task = self._progress.task("compiling kernels", len(wanted), "kernels")
        with task, ThreadPoolExecutor(COMPILERS) as pool:
            made = pool.map(lambda w: load(w[0], w[1], arch, directory), wanted.values())
            for key, cubin in zip(wanted, made, strict=True):
                images[key] = cubin.image
                task.advance(1)
        modules = {key: self._driver.module(image) for key, image in images.items()}
        return {
            kernel: self._driver.function(modules[kernel[:2]], str(kernel[2]), size)
            for kernel, size in shared.items()
        }

    # ---- run -----------------------------------------------------------------------------

    def run(self, calls: Sequence[Call]) -> None:
        """See Engine."""
        self._enter()
        bounds = [self._bound[id(call)] for call in calls]
        key = (*map(id, bounds), *(turn.front for bound in bounds for turn in bound.turns))
        if key not in self._captured:
            self._captured[key] = self._capture(bounds)
        else:
            for bound in bounds:
                _turn(bound)
        self._page.flush(self._page_at, self._ring)
        self._captured[key].run()

    def _capture(self, bounds: Sequence[Bound]) -> Captured:
        """Leaves the tensors turned as they are after the calls."""
        launches: list[tuple[Planned, list[tuple[str, int | float]]]] = []
        for bound in bounds:
            for planned in bound.planned:
                self._write_tables(bound, planned)
                launches.append((planned, values(bound, planned, self._places)))
            _turn(bound)
        name = "+".join(bound.program.name for bound in bounds)
        return self._launcher.capture(name, launches, graph=self._config.graphs)

    def _write_tables(self, bound: Bound, planned: Planned) -> None:
        for argument in planned.launch.arguments:
            if isinstance(argument, Addresses):
                content = table(bound, planned.step, argument, self._places)
                if content not in self._places.tables:
                    at = next(self._spare)
                    data = np.frombuffer(content, np.uint8)
                    self._driver("cuMemcpyHtoD", at, data.ctypes.data, len(content))
                    self._places.tables[content] = at

    def excerpt(self, calls: Sequence[Call], keep: Callable[[Step], bool]) -> Captured:
        """Some steps of prepared calls as one graph, for measuring. What runs this way leaves
        values behind that mean nothing.
        """
        launches: list[tuple[Planned, list[tuple[str, int | float]]]] = []
        for bound in [self._bound[id(call)] for call in calls]:
            for planned in bound.planned:
                if keep(planned.step):
                    self._write_tables(bound, planned)
                    launches.append((planned, values(bound, planned, self._places)))
        return self._launcher.capture("excerpt", launches, graph=self._config.graphs)

    def program(self, name: str) -> Program:
        """A loaded graph's program."""
        return self._graphs[name].program

    def launches(self, calls: Sequence[Call]) -> int:
        """Kernels that the calls launch."""
        return sum(len(self._bound[id(call)].planned) for call in calls)

    @property
    def driver(self) -> Driver:
        """The device, for measuring."""
        return self._driver

    @property
    def weights(self) -> tuple[int, int]:
        """Address and bytes of the weights, which lie together."""
        return self._arena.base, self._arena.sizes["weights"]

    def also(self, calls: Sequence[Call]) -> None:
        """Calls to get ready for beside those of the model, said before `prepare`."""
        self._others += calls

    def write(self, tensor: Tensor, values: Array) -> None:
        """See Engine."""
        self._enter()
        t = cuda(tensor)
        data = np.ascontiguousarray(values, t.spec.dtype.numpy)
        for at, piece in corners(t.spec, data):
            if t.control >= 0:
                self._page.write(t.control + at, piece)
            else:
                self._ring.send(t.now + at, piece)

    def read(self, tensor: Tensor, shape: tuple[int, ...] | None = None) -> Array:
        """See Engine."""
        self._enter()
        t = cuda(tensor)
        self._page.flush(self._page_at, self._ring)
        out = np.empty(t.spec.at({}) if shape is None else shape, t.spec.dtype.numpy)
        for at, piece in corners(t.spec, out):
            for start in range(0, len(piece), RING):
                part = piece[start : start + RING]
                self._driver(
                    "cuMemcpyDtoHAsync",
                    self._back.address,
                    t.now + at + start,
                    len(part),
                    self._driver.stream,
                )
                self._driver.synchronize()
                part[:] = self._back.bytes[: len(part)]
        self._ring.idle()
        self._collect()
        return out

    def _collect(self) -> None:
        for captured in self._captured.values():
            self._seconds[captured.name] = self._seconds.get(captured.name, 0.0) + sum(
                captured.collect()
            )

    def busy(self) -> Mapping[str, float]:
        """See Engine. Graphs that run as one are one name: "propose+verify+accept+observe"."""
        return dict(self._seconds)

    def _enter(self) -> None:
        """Make the context current: a session may move to another thread between requests."""
        if self._thread != threading.get_ident():
            self._driver.enter()
            self._thread = threading.get_ident()

    def close(self) -> None:
        """See Engine."""
        self._captured.clear()
        self._driver.close()


@dataclass(slots=True)
class Offsets:
    """Where things will lie in the arena."""

    weights: Mapping[str, Weight]
    weights_at: Mapping[str, int]
    page: int = 0
    values: int = 0
    working: int = 0
    zeroed: dict[tuple[int, str], int] = field(default_factory=dict[tuple[int, str], int])
    tables: dict[bytes, int] = field(default_factory=dict[bytes, int])
    spare: list[int] = field(default_factory=list[int])


def _launches(bounds: Sequence[Bound]) -> Iterator[tuple[Planned, Launch]]:
    for planned in itertools.chain.from_iterable(bound.planned for bound in bounds):
        yield planned, planned.launch


def _turn(bound: Bound) -> None:
    for turn in bound.turns:
        turn.front = 1 - turn.front


def corners(spec: TensorSpec, array: Array) -> Iterator[tuple[int, Array]]:
    """The contiguous runs of a tensor's leading corner: offset in bytes, and uint8 view of the
    array's part.
    """
    whole, part = spec.at({}), array.shape
    assert all(p <= w for p, w in zip(part, whole, strict=True)), (spec, part)
    # Axes from `split` on are complete, so everything under one index before it is one run.
    split = len(part)
    while split > 0 and part[split - 1] == whole[split - 1]:
        split -= 1
    head = part[: max(split - 1, 0)]
    strides = np.cumprod([1, *whole[:0:-1]], dtype=np.int64)[::-1] * spec.dtype.bytes
    flat = array.reshape(*head, -1) if head else array.reshape(1, -1)
    for index in np.ndindex(*head) if head else [(0,)]:
        offset = int(sum(i * s for i, s in zip(index, strides, strict=False))) if head else 0
        yield offset, flat[index].view(np.uint8)
