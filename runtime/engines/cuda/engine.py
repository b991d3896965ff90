"""The CUDA engine: programs are captured once and replayed as one CUDA graph per step."""

# cuda-python publishes no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from thor_dflash.plugins.launch import PREFETCHED, Device, PointerTable, Scratch, Table
from thor_dflash.plugins.registry import KERNELS
from thor_dflash.runtime.engines.cuda.arena import Arena
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
from thor_dflash.runtime.engines.cuda.graph_replay import GraphReplay, Segment
from thor_dflash.runtime.engines.cuda.tuning_record import (
    TunedLaunch,
    TuningFile,
    TuningRecord,
    digest,
    power_mode,
    tuning_file,
)
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
        self.write, self.read = self.replay.write, self.replay.read
        self.clear = self.replay.clear
        self._config = config
        self._progress = progress
        self._fill = fill or FileWeights(package, progress)
        self._graphs: dict[str, CudaGraph] = {}
        self._others: list[Call] = []
        self.tuned = self.info.device
        """The device with the choices that were measured on it."""
        self._record: TuningRecord | None = None
        self._choices = ""

    @property
    def info(self) -> DeviceInfo:
        """The device."""
        return self.driver.info

    @property
    def device(self) -> str:
        """See Engine. Names the choices that are not the rules', since they decide bits."""
        return f"{self.info}{self._choices and f', tuned {self._choices}'}"

    @property
    def tunings(self) -> TuningFile:
        """Where the record of this device is."""
        return tuning_file(self._config.tunings_directory, self.info, power_mode())

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
        self.tuned = self._tuned()
        for call in (*calls, *self._others):
            graph = call.graph
            assert isinstance(graph, CudaGraph)
            self.replay.bound[call] = bind(call, graph.program, self.tuned)
        bounds = list(self.replay.bound.values())
        self._choices = digest((s for bound in bounds for s in bound.sites), self.tuned.tuned)
        if self._config.tune == "required":
            self._require_tuned(bounds)
        self.tensors.assign_buffers([(bound, in_place(bound.program)) for bound in bounds])
        offsets = self._count(bounds)
        base = self.tensors.allocate(offsets.page)
        self._place(base, offsets)
        self._write_tables(bounds, (base + offset for offset in offsets.spare), self._places)
        self._kernels = self._load(bounds, offsets.weights)
        self.driver("cuCtxSynchronize")

    def _tuned(self) -> Device:
        """The device with the choices of its record, if there is one and the configuration lets it
        be used.
        """
        if self._config.tune == "off":
            return self.info.device
        file = self.tunings
        record = self._record = file.read()
        if record is None:
            return self.info.device
        if record.power != file.power:
            with self._progress.task(
                f"warning: launches were tuned in power mode {record.power or 'unknown'}, this is "
                f"{file.power or 'unknown'}; thor-dflash tune --package {self.package}"
            ):
                pass
        return replace(self.info.device, tuned=record.choices())

    def _require_tuned(self, bounds: Sequence[BoundProgram]) -> None:
        known = self._record.launches.keys() if self._record else set[str]()
        sites = {site.key: site for bound in bounds for site in bound.sites}
        missing = sum(
            len(KERNELS[site.op.name].candidates(site, self.info.device, None)) > 1
            for key, site in sites.items()
            if key not in known
        )
        if missing:
            raise EngineError(
                "engine.tune required must be for a package whose launches were measured here "
                f"(got {missing} that were not); thor-dflash tune --package {self.package}"
            )

    def _count(self, bounds: Sequence[BoundProgram]) -> Offsets:
        """Reserve space for everything, in the order of the memory table."""
        take = self.tensors.arena.take
        weights: dict[str, Weight] = {}
        for bound in bounds:
            weights |= bound.program.weights
        found = Offsets(weights, {n: take("weights", w.nbytes) for n, w in weights.items()})
        found.page = self.tensors.count()
        self._values = max((b.program.scratch for b in bounds), default=0)
        found.values = take("scratch", self._values)
        found.working = take("scratch", max((b.working for b in bounds), default=0))
        for one in _launches(bounds):
            self._count_launch(self.tensors.arena, found, one)
        return found

    def _count_launch(self, arena: Arena, found: Offsets, one: BoundLaunch) -> None:
        take = arena.take
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

    def _write_tables(
        self, bounds: Sequence[BoundProgram], spare: Iterator[int], places: Places
    ) -> None:
        """Write the tables of addresses, each to the next of `spare`, and note them in `places`.

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
                        made = table(bound, one, argument, places)
                        self._write_table(places.tables.setdefault(made, next(spare)), made)

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
        """Capture some steps of prepared calls as one graph. The values that they leave behind are
        those of a run only if every step before has run. No weight is prefetched for a step that is
        left out.
        """
        segment = self.replay.segment([self.replay.bound[call] for call in calls])
        with self.replay.captured_places(segment):
            kept = [
                pair for bound in segment.calls for pair in self._kept(bound, keep, self._places)
            ]
        return self._measured(segment, kept)

    def _kept(
        self, bound: BoundProgram, keep: Callable[[Step], bool], places: Places
    ) -> Iterator[tuple[BoundLaunch, Arguments]]:
        kept = [one for one in bound.launches if keep(one.step)]
        read = {one.step.ports.get("packed") for one in kept}
        for one in kept:
            out = () if one.step.ports.get(PREFETCHED) in read else (PREFETCHED,)
            yield one, arguments(bound, one, places, out)

    def _measured(
        self, segment: Segment[BoundProgram], launches: Sequence[tuple[BoundLaunch, Arguments]]
    ) -> CapturedGraph:
        self.tensors.show_places(segment.touched)
        self.tensors.flush()
        enqueued = partial(enqueue_launches, self.driver, self._kernels, launches, first=True)
        captured = capture("excerpt", self.driver, [enqueued], graph=self._config.graphs)

        def start() -> None:
            self.replay.times.latest = None  # the excerpt overwrites what the last run read back
            captured.start()

        return replace(captured, start=start)

    def trial(self, call: Call, steps: Sequence[Step], device: Device) -> LaunchTrial:
        """Capture some steps of a prepared call as `excerpt` does, but launched by the choices of
        `device`, with tables, scratch memory and arrival counters of their own.
        """
        prepared = self.replay.bound[call]
        bound = bind(call, replace(prepared.program, steps=tuple(steps)), device)
        bound.touched, bound.swapped = prepared.touched, prepared.swapped
        arena, found = Arena(), Offsets({}, {})
        found.working = arena.take("scratch", bound.working)
        for one in bound.launches:
            self._count_launch(arena, found, one)
            self._kernels.function(one.source, one.launch)
        segment = self.replay.segment([bound])
        with self.driver.all_or_nothing():
            base = self.driver.allocate(arena.nbytes)
            self.driver("cuMemsetD8", base, 0, arena.nbytes)
            tables = {content: base + offset for content, offset in found.tables.items()}
            places = replace(self._places, arena=base, working=base + found.working, tables=tables)
            for content, at in tables.items():
                self._write_table(at, content)
            with self.replay.captured_places(segment):
                self._write_tables([bound], (base + offset for offset in found.spare), places)
                kept = [*self._kept(bound, lambda step: True, places)]
            trial = LaunchTrial(self._measured(segment, kept), base)
            self.driver("cuCtxSynchronize")  # the copies may still be under way
        return trial

    @property
    def tuned_launches(self) -> list[TunedLaunch]:
        """Launches of the prepared calls that are not the rules'."""
        if self._record is None:
            return []
        sites = {site.key for bound in self.replay.bound.values() for site in bound.sites}
        return [one for key, one in self._record.launches.items() if one.chosen and key in sites]

    @property
    def kernels(self) -> Kernels:
        """The kernels of the prepared calls."""
        return self._kernels

    @property
    def values(self) -> tuple[int, int]:
        """Address and bytes of the memory of intermediate values."""
        return self._places.values, self._values

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


@dataclass(frozen=True, slots=True)
class LaunchTrial:
    """Captured steps with memory of their own."""

    captured: CapturedGraph
    memory: int
    """Its address."""

    def close(self) -> None:
        """Free both, after the last run has been collected."""
        self.captured.free()
        self.captured.driver.free(self.memory)


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
