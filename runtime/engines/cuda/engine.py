"""The CUDA engine: programs are captured once and replayed as one CUDA graph per step."""

# cuda-python publishes no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.errors import EngineError
from thor_dflash.core.progress import Progress
from thor_dflash.core.tensors import TensorSpec
from thor_dflash.package.launch_program import Program, Step, Weight, read
from thor_dflash.plugins.cuda.driver import Driver
from thor_dflash.plugins.cuda.enqueue import Arguments
from thor_dflash.plugins.cuda.kernel_cache import Kernels
from thor_dflash.plugins.launch import PREFETCHED, Launch, PointerTable, Scratch, Table
from thor_dflash.runtime.engines.cuda.base import Board
from thor_dflash.runtime.engines.cuda.binding import (
    Bound,
    Places,
    Planned,
    address,
    arguments,
    bind,
    in_place,
    table,
    without_offset,
)
from thor_dflash.runtime.engines.cuda.graph_capture import CapturedGraph, Launcher
from thor_dflash.runtime.engines.cuda.weight_loader import FileWeights, WeightFiller
from thor_dflash.runtime.engines.protocol import Call, Graph


@dataclass(slots=True, eq=False)
class CudaGraph:
    """A program and its ports."""

    name: str
    program: Program
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]


class CudaEngine(Board):
    """Programs of one package directory on one device."""

    def __init__(
        self,
        package: Path,
        config: EngineConfig,
        progress: Progress,
        fill: WeightFiller | None = None,
    ) -> None:
        super().__init__(Driver(config.device), told=True)
        self.package = package
        self._config = config
        self._progress = progress
        self._fill = fill or FileWeights(package, progress)
        self._graphs: dict[str, CudaGraph] = {}
        self._bound: dict[int, Bound] = {}
        self._others: list[Call] = []

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
        device = self._driver.info.device
        for call in (*calls, *self._others):
            graph = call.graph
            assert isinstance(graph, CudaGraph)
            self._bound[id(call)] = bind(call, graph.program, device)
        bounds = list(self._bound.values())
        self._take_turns([(bound.call, in_place(bound.program)) for bound in bounds])
        for bound in bounds:
            bound.turns = self._turns[id(bound.call)]
        offsets = self._count(bounds)
        self._place(self._allocate(offsets.page), offsets)
        self._write_tables(bounds, iter(offsets.spare))
        kernels = self._load(bounds, offsets.weights)
        self._launcher = Launcher(self._driver, kernels)
        self._driver("cuCtxSynchronize")

    def _count(self, bounds: Sequence[Bound]) -> Offsets:
        """Reserve space for everything, in the order of the memory table."""
        take = self._arena.take
        weights: dict[str, Weight] = {}
        for bound in bounds:
            weights |= bound.program.weights
        found = Offsets(weights, {n: take("weights", w.nbytes) for n, w in weights.items()})
        found.page = self._count_tensors()
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
            elif isinstance(argument, PointerTable):
                found.spare.append(self._arena.take("tables", 8 * len(argument.ports)))

    def _place(self, base: int, found: Offsets) -> None:
        """Turn offsets into addresses, and write the constant tables."""
        self._places = Places(
            {name: base + offset for name, offset in found.weights_at.items()},
            base + found.values,
            base + found.working,
            {key: base + offset for key, offset in found.zeroed.items()},
            {content: base + offset for content, offset in found.tables.items()},
        )
        for content, at in self._places.tables.items():
            self._write_table(at, content)

    def _write_tables(self, bounds: Sequence[Bound], spare: Iterator[int]) -> None:
        """Write the tables of addresses.

        Raises:
            EngineError: a kernel takes no argument that tells where a state with two places is.
        """
        for bound in bounds:
            for planned in bound.planned:
                if ports := without_offset(bound, planned):
                    raise EngineError(
                        f"{bound.program.name}: {planned.step.name}: a kernel must be told where "
                        f"states with two places are (got none for {', '.join(ports)})"
                    )
                for argument in planned.launch.arguments:
                    if isinstance(argument, PointerTable):
                        made = table(bound, planned, argument, self._places)
                        at = self._arena.base + next(spare)
                        self._write_table(self._places.tables.setdefault(made, at), made)

    def _write_table(self, at: int, content: bytes) -> None:
        data = np.frombuffer(content, np.uint8)
        self._driver("cuMemcpyHtoD", at, data.ctypes.data, len(content))

    def _load(self, bounds: Sequence[Bound], weights: Mapping[str, Weight]) -> Kernels:
        """Load weights and compile kernels at the same time: one is limited by the disk, the other
        by the CPU.
        """
        packed = {name: site for bound in bounds for name, site in bound.packed.items()}
        cubins = self._config.cubins_directory
        overlap = self._config.overlap
        kernels = Kernels(self._driver, self._driver.info.device, cubins, overlap=overlap)
        launches = [(planned.source, launch) for planned, launch in _launches(bounds)]
        with kernels.compiling(launches) as images:
            self._fill(self._driver, weights, self._places.weights, packed)
            with self._progress.task("compiling kernels", len(images), "kernels") as task:
                images.load(task.advance)
        for source, launch in launches:
            kernels.function(source, launch)
        return kernels

    # ---- run -----------------------------------------------------------------------------

    def _capture(self, calls: Sequence[Call]) -> CapturedGraph:
        launches: list[list[tuple[Planned, Arguments]]] = []
        for call in calls:
            bound = self._bound[id(call)]
            each = [(one, arguments(bound, one, self._places)) for one in bound.planned]
            launches.append(each)
            self._turn(call)
        name = "+".join(call.graph.name for call in calls)
        handover, graph = self._handover(calls), self._config.graphs
        return self._launcher.capture(name, launches, handover, graph=graph)

    def excerpt(self, calls: Sequence[Call], keep: Callable[[Step], bool]) -> CapturedGraph:
        """Capture some steps of prepared calls as one graph, for measurements. The values that they
        leave behind are meaningless. No weight is prefetched for a step that is left out.
        """
        launches: list[tuple[Planned, Arguments]] = []
        part = self._part(calls)
        with self._as_placed(part):
            for bound in [self._bound[id(call)] for call in calls]:
                kept = [planned for planned in bound.planned if keep(planned.step)]
                read = {planned.step.ports.get("packed") for planned in kept}
                for planned in kept:
                    out = () if planned.step.ports.get(PREFETCHED) in read else (PREFETCHED,)
                    launches.append((planned, arguments(bound, planned, self._places, out)))
        self._tell(part)
        self._page.flush(self._page_at, self._ring)
        captured = self._launcher.capture("excerpt", [launches], graph=self._config.graphs)

        def start() -> None:
            self._runs.latest = None  # the excerpt overwrites what the last run handed over
            captured.start()

        return CapturedGraph("excerpt", self._driver, start)

    def place(self, call: Call, step: Step, port: str) -> int:
        """Device address of what a step of a prepared call reads or writes at a port."""
        return address(self._bound[id(call)], step, port, self._places)

    def program(self, name: str) -> Program:
        """A loaded graph's program."""
        return self._graphs[name].program

    def launches(self, calls: Sequence[Call]) -> int:
        """Number of kernels that the calls launch."""
        return sum(len(self._bound[id(call)].planned) for call in calls)

    @property
    def weights(self) -> tuple[int, int]:
        """Address and bytes of the weights, which are contiguous."""
        return self._arena.base, self._arena.sizes["weights"]

    def also(self, calls: Sequence[Call]) -> None:
        """Add calls to prepare besides those of the model. Must precede `prepare`."""
        self._others += calls


@dataclass(slots=True)
class Offsets:
    """Where everything will be in the arena."""

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
