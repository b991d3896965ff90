"""The CUDA engine: programs are captured once and replayed as one CUDA graph per step."""

# cuda-python publishes no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.errors import EngineError
from thor_dflash.core.progress import Progress
from thor_dflash.core.tensors import TensorSpec
from thor_dflash.package.launch_program import Program, Step, Weight, read
from thor_dflash.plugins.cuda.driver import DeviceInfo, Driver
from thor_dflash.plugins.cuda.enqueue import Arguments, enqueue
from thor_dflash.plugins.cuda.kernel_cache import Kernels
from thor_dflash.plugins.launch import PREFETCHED, PointerTable, Scratch, Table
from thor_dflash.runtime.engines.cuda.binding import (
    BoundLaunch,
    BoundProgram,
    Places,
    address,
    arguments,
    bind,
    in_place,
    table,
    without_offset,
)
from thor_dflash.runtime.engines.cuda.device_tensors import DeviceTensors
from thor_dflash.runtime.engines.cuda.graph_capture import CapturedGraph, capture
from thor_dflash.runtime.engines.cuda.graph_replay import GraphReplay
from thor_dflash.runtime.engines.cuda.weight_loader import FileWeights, WeightFiller
from thor_dflash.runtime.engines.protocol import Call, Graph


@dataclass(slots=True, eq=False)
class CudaGraph:
    """A program and its ports."""

    name: str
    program: Program
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]


class CudaEngine:
    """Programs of one package directory on one device."""

    def __init__(
        self,
        package: Path,
        config: EngineConfig,
        progress: Progress,
        fill: WeightFiller | None = None,
    ) -> None:
        self.driver = Driver(config.device)
        self.package = package
        self.tensors = DeviceTensors(self.driver, indirect=True)
        self.replay = GraphReplay(self.tensors, self._resolve, graphs=config.graphs)
        self.empty, self.reserve = self.tensors.empty, self.tensors.reserve
        self.swap_out, self.swap_in = self.tensors.swap_out, self.tensors.swap_in
        self.run, self.busy, self.close = self.replay.run, self.replay.busy, self.replay.close
        self.write, self.clear, self.read = (
            self.replay.write,
            self.replay.clear,
            self.replay.read,
        )
        self._config = config
        self._progress = progress
        self._fill = fill or FileWeights(package, progress)
        self._graphs: dict[str, CudaGraph] = {}
        self._others: list[Call] = []

    @property
    def info(self) -> DeviceInfo:
        """The device."""
        return self.driver.info

    @property
    def device(self) -> str:
        """See Engine."""
        return str(self.info)

    @property
    def memory(self) -> Mapping[str, int]:
        """Device memory of the engine: kind -> bytes."""
        return dict(self.tensors.arena.sizes)

    @property
    def loads_late(self) -> bool:
        """See Engine."""
        return False

    def load(self, name: str) -> Graph:
        """See Engine."""
        if name not in self._graphs:
            program = read(self.package, name)
            inputs = {n: v.spec(n) for n, v in program.inputs.items()}
            outputs = {n: v.spec(n) for n, v in program.outputs.items()}
            self._graphs[name] = CudaGraph(name, program, inputs, outputs)
        return self._graphs[name]

    # ---- prepare -------------------------------------------------------------------------

    def prepare(self, calls: Sequence[Call]) -> None:
        """See Engine."""
        for call in (*calls, *self._others):
            graph = call.graph
            assert isinstance(graph, CudaGraph)
            self.replay.bound[call] = bind(call, graph.program, self.info.device)
        bounds = list(self.replay.bound.values())
        self.tensors.assign_buffers([(bound, in_place(bound.program)) for bound in bounds])
        offsets = self._count(bounds)
        self._place(self.tensors.allocate(offsets.page), offsets)
        self._write_tables(bounds, iter(offsets.spare))
        self._kernels = self._load(bounds, offsets.weights)
        self.driver("cuCtxSynchronize")

    def _count(self, bounds: Sequence[BoundProgram]) -> Offsets:
        """Reserve space for everything, in the order of the memory table."""
        take = self.tensors.arena.take
        weights: dict[str, Weight] = {}
        for bound in bounds:
            weights |= bound.program.weights
        found = Offsets(weights, {n: take("weights", w.nbytes) for n, w in weights.items()})
        found.page = self.tensors.count()
        found.values = take("scratch", max((b.program.scratch for b in bounds), default=0))
        found.working = take("scratch", max((b.working for b in bounds), default=0))
        for one in _launches(bounds):
            self._count_launch(found, one)
        return found

    def _count_launch(self, found: Offsets, one: BoundLaunch) -> None:
        take = self.tensors.arena.take
        for argument in one.launch.arguments:
            if isinstance(argument, Scratch) and argument.zeroed:
                if argument.name not in one.counters:
                    one.counters[argument.name] = take("scratch", argument.nbytes)
            elif isinstance(argument, Table):
                content = argument.values.tobytes()
                if content not in found.tables:
                    found.tables[content] = take("tables", len(content))
            elif isinstance(argument, PointerTable):
                found.spare.append(take("tables", 8 * len(argument.ports)))

    def _place(self, base: int, found: Offsets) -> None:
        """Turn offsets into addresses, and write the constant tables."""
        self._places = Places(
            base,
            {name: base + offset for name, offset in found.weights_at.items()},
            base + found.values,
            base + found.working,
            {content: base + offset for content, offset in found.tables.items()},
        )
        for content, at in self._places.tables.items():
            self._write_table(at, content)

    def _write_tables(self, bounds: Sequence[BoundProgram], spare: Iterator[int]) -> None:
        """Write the tables of addresses.

        Raises:
            EngineError: a kernel takes no argument for the place of a state with two places.
        """
        for bound in bounds:
            for one in bound.launches:
                if ports := without_offset(bound, one):
                    raise EngineError(
                        f"{bound.program.name}: {one.step.name}: a kernel must have a BufferOffset "
                        f"for states with two places (got none for {', '.join(ports)})"
                    )
                for argument in one.launch.arguments:
                    if isinstance(argument, PointerTable):
                        made = table(bound, one, argument, self._places)
                        at = self.tensors.arena.base + next(spare)
                        self._write_table(self._places.tables.setdefault(made, at), made)

    def _write_table(self, at: int, content: bytes) -> None:
        data = np.frombuffer(content, np.uint8)
        self.driver("cuMemcpyHtoD", at, data.ctypes.data, len(content))

    def _load(self, bounds: Sequence[BoundProgram], weights: Mapping[str, Weight]) -> Kernels:
        """Load weights and compile kernels at the same time: one is limited by the disk, the other
        by the CPU.
        """
        packed = {name: site for bound in bounds for name, site in bound.packed.items()}
        cubins, overlap = self._config.cubins_directory, self._config.overlap
        kernels = Kernels(self.driver, self.info.device, cubins, overlap=overlap)
        launches = [(one.source, one.launch) for one in _launches(bounds)]
        with kernels.compiling(launches) as images:
            self._fill(self.driver, weights, self._places.weights, packed)
            with self._progress.task("compiling kernels", len(images), "kernels") as task:
                images.load(task.advance)
        for source, launch in launches:
            kernels.function(source, launch)
        return kernels

    # ---- run -----------------------------------------------------------------------------

    def _resolve(self, bound: BoundProgram, first: bool) -> Callable[[], None]:
        launches = [(one, arguments(bound, one, self._places)) for one in bound.launches]
        return partial(enqueue_launches, self.driver, self._kernels, launches, first=first)

    # ---- measurements --------------------------------------------------------------------

    def excerpt(self, calls: Sequence[Call], keep: Callable[[Step], bool]) -> CapturedGraph:
        """Capture some steps of prepared calls as one graph, for measurements. The values that they
        leave behind are meaningless. No weight is prefetched for a step that is left out.
        """
        launches: list[tuple[BoundLaunch, Arguments]] = []
        segment = self.replay.segment([self.replay.bound[call] for call in calls])
        with self.replay.captured_places(segment):
            for bound in segment.calls:
                kept = [one for one in bound.launches if keep(one.step)]
                read = {one.step.ports.get("packed") for one in kept}
                for one in kept:
                    out = () if one.step.ports.get(PREFETCHED) in read else (PREFETCHED,)
                    launches.append((one, arguments(bound, one, self._places, out)))
        self.tensors.show_places(segment.touched)
        self.tensors.flush()
        enqueued = partial(enqueue_launches, self.driver, self._kernels, launches, first=True)
        captured = capture("excerpt", self.driver, [enqueued], graph=self._config.graphs)

        def start() -> None:
            self.replay.times.latest = None  # the excerpt overwrites what the last run read back
            captured.start()

        return CapturedGraph("excerpt", self.driver, start)

    def note(self) -> list[float]:
        """A list of the seconds of each run from now on, in order; `busy` brings it up to date."""
        self.replay.times.noted = []
        return self.replay.times.noted

    def place(self, call: Call, step: Step, port: str) -> int:
        """Device address of what a step of a prepared call reads or writes at a port."""
        return address(self.replay.bound[call], step, port, self._places)

    def program(self, name: str) -> Program:
        """A loaded graph's program."""
        return self._graphs[name].program

    def launches(self, calls: Sequence[Call]) -> int:
        """Number of kernels that the calls launch."""
        return sum(len(self.replay.bound[call].launches) for call in calls)

    @property
    def weights(self) -> tuple[int, int]:
        """Address and bytes of the weights, which are contiguous."""
        return self.tensors.arena.base, self.tensors.arena.sizes["weights"]

    def also(self, calls: Sequence[Call]) -> None:
        """Add calls to prepare besides those of the model. Must precede `prepare`."""
        self._others += calls


def enqueue_launches(
    driver: Driver,
    kernels: Kernels,
    launches: Sequence[tuple[BoundLaunch, Arguments]],
    *,
    first: bool,
) -> None:
    """Enqueue launches. With `first`, the first of them overlaps nothing that ran before."""
    for i, (one, values) in enumerate(launches):
        kernel = kernels.function(one.source, one.launch)
        overlap = kernels.overlap and one.launch.overlap and not (first and i == 0)
        enqueue(driver, driver.stream, kernel, one.launch, values, overlap=overlap)


@dataclass(slots=True)
class Offsets:
    """Where everything will be in the arena."""

    weights: Mapping[str, Weight]
    weights_at: Mapping[str, int]
    page: int = 0
    values: int = 0
    working: int = 0
    tables: dict[bytes, int] = field(default_factory=dict[bytes, int])
    spare: list[int] = field(default_factory=list[int])


def _launches(bounds: Sequence[BoundProgram]) -> Iterator[BoundLaunch]:
    return itertools.chain.from_iterable(bound.launches for bound in bounds)
