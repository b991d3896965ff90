"""Measures what the steps of a package cost on this device."""

from __future__ import annotations

import itertools
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from thor_dflash.core.tensors import Array, DType, TensorSpec
from thor_dflash.package.launch_program import Program, Step
from thor_dflash.package.manifest import Manifest
from thor_dflash.plugins.contract import NEXT
from thor_dflash.plugins.launch import PREFETCHED, Device, Int, Launch, Pointer
from thor_dflash.plugins.registry import ROOT
from thor_dflash.plugins.standard import fill
from thor_dflash.plugins.verify_attention import TILE
from thor_dflash.runtime.decoding.block import DecodeProgress
from thor_dflash.runtime.decoding.loop import DecodeRequest, decode
from thor_dflash.runtime.decoding.model_runner import ModelRunner
from thor_dflash.runtime.decoding.mtp import own_drafter
from thor_dflash.runtime.decoding.telemetry import RequestMeter
from thor_dflash.runtime.engines.cuda.binding import cuda
from thor_dflash.runtime.engines.cuda.engine import CudaEngine
from thor_dflash.runtime.engines.cuda.graph_capture import CapturedGraph
from thor_dflash.runtime.engines.cuda.launch_runner import LaunchRunner
from thor_dflash.runtime.engines.protocol import Call, Tensor

BLOCK_BYTES = 512 * 8 * 16
"""Bytes that one thread block of read_memory reads at a time."""
WARM, RUNS = 10, 15
REST = 0.25
"""Seconds of rest before a step is timed. A few seconds of repetition bring an H100 to its power
limit; its clock then falls, and it would be chance which step is affected."""
BATCH = 30
"""Runs per median, for a step that is repeated without rest."""
STATE = {"state": (0.0, 0.1), "states": (0.0, 0.1), "record_d": (0.0, 0.1),
         "record_k": (0.0, 0.088), "record_decay": (0.9, 0.0)}  # fmt: skip
"""Mean and deviation of gdn states other than 0 and 1: keys of length 1, states that last."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Time of one step, milliseconds."""

    median: float
    low: float
    high: float
    runs: int


@dataclass(frozen=True, slots=True)
class LoopTiming:
    """Time of a cycle of the real loop, seconds."""

    clock: float
    """Median wall time."""
    graph: float
    """Median time in the CUDA graph."""
    host: float
    """Median of the wall time minus the time in the CUDA graph."""
    mean: float
    """Mean of that; above the median if something else used the CPU now and then."""


@dataclass(frozen=True, slots=True)
class StepGroup:
    """The steps of a program that differ only in their layer."""

    names: frozenset[str]
    """Names of the steps."""
    nbytes: int
    """Bytes of weights that they read in total."""

    def __contains__(self, step: Step) -> bool:
        return step.name in self.names


Keep = Callable[[Step], bool]


def everything(step: Step) -> bool:
    """Keep every step of a call."""
    del step
    return True


def operators(*names: str) -> Keep:
    """Keep only the steps of some operators."""
    return lambda step: step.op in names


@dataclass(slots=True)
class CudaBench:
    """Measurements of one package on one engine."""

    engine: CudaEngine
    model: ModelRunner
    runner: LaunchRunner
    extra: dict[str, Call]
    """Verify steps of other widths, by name."""
    free: int
    """Free device memory before anything was captured, bytes."""

    def bandwidth(self) -> float:
        """Read bandwidth, bytes per second, of the simplest kernel reading the weights."""
        driver = self.engine.driver
        base, size = self.engine.weights
        blocks = min(size // BLOCK_BYTES, 2**31 - 1)
        launch = Launch(
            "read_memory",
            (driver.info.device.multiprocessors * 4, 1, 1),
            512,
            (Pointer("from"), Pointer("sink"), Int(blocks)),
        )
        at = {"from": base, "sink": cuda(self.call("verify").outputs["logits"]).now}

        def start() -> None:
            self.runner.run(ROOT / "cuda" / "bandwidth.cu", launch, at)

        timing = self._time(CapturedGraph("read", driver, start))
        return blocks * BLOCK_BYTES / timing.median * 1e3

    @property
    def device(self) -> str:
        """Description of the device."""
        return self.engine.device

    @property
    def block(self) -> int:
        """Rows of a verify."""
        return self.model.block

    @property
    def chunk(self) -> int:
        """Rows of a prefill step."""
        return self.model.chunk

    @property
    def memory(self) -> Mapping[str, int]:
        """Memory that the engine allocated: kind -> bytes."""
        return self.engine.memory

    def captured(self) -> int:
        """Device memory used since the engine was ready, bytes: captured graphs, and what the
        driver loads when a kernel first runs.
        """
        return self.free - self.engine.driver.free_memory()

    def call(self, name: str) -> Call:
        """A step of the model, or a verify step of another width."""
        return self.extra[name] if name in self.extra else self.model.call(name)

    def bytes(self, name: str, ops_: Sequence[str]) -> int:
        """Bytes of weights that some operators of a step read."""
        return sum(s.nbytes for s in self.shares(name, ops_).values())

    def shares(self, name: str, ops_: Sequence[str]) -> dict[str, StepGroup]:
        """The program steps of some operators, grouped over the layers: layers.*.mlp.down_proj and
        so on.
        """
        program = self._program(name)
        found: dict[str, list[Step]] = {}
        for step in program.steps:
            if step.op in ops_:
                found.setdefault(re.sub(r"\b\d+\b", "*", step.name), []).append(step)
        return {
            kind: StepGroup(
                frozenset(s.name for s in steps),
                sum(
                    program.weights[n].nbytes
                    for n in {n for s in steps for port, n in s.ports.items() if port != PREFETCHED}
                    if n in program.weights
                ),
            )
            for kind, steps in found.items()
        }

    def operators(self, name: str) -> tuple[str, ...]:
        """Every operator that a step uses."""
        return tuple(dict.fromkeys(step.op for step in self._program(name).steps))

    def _program(self, name: str) -> Program:
        return self.engine.program(self.call(name).graph.name)

    def launches(self, names: Sequence[str]) -> int:
        """Number of kernels that some steps launch."""
        return self.engine.launches([self.call(name) for name in names])

    def cache_bytes(self) -> int:
        """Bytes of key/value cache per token."""
        caches = [t.spec for n, t in self.model.state.tensors.items() if n.startswith("attention.")]
        return sum(spec.nbytes({}) // spec.at({})[1] for spec in caches)

    def state_bytes(self) -> int:
        """Bytes of recurrent state and records that a verify reads plus those that it writes. Of
        the states after every row it writes all, and reads one at most, in the place of the state.
        """
        sizes = {n: t.spec.nbytes({}) for n, t in self.model.state.tensors.items()}
        return sum(
            size if n.endswith(".states") else 2 * size
            for n, size in sizes.items()
            if n.startswith("gdn.")
        )

    def steps(self, names: Sequence[str], keep: Keep = everything) -> Timing:
        """Time some steps of some graphs, run one after the other in one CUDA graph."""
        self.fill_state()
        return self._time(self.engine.excerpt([self.call(name) for name in names], keep))

    def repeated(self, names: Sequence[str], seconds: float) -> Timing:
        """Time all steps of some graphs, repeated without rest: medians of every BATCH runs."""
        self.fill_state()
        captured = self.engine.excerpt([self.call(name) for name in names], everything)
        end = time.perf_counter() + seconds
        medians: list[float] = []
        while not medians or time.perf_counter() < end:
            medians.append(statistics.median(self._run(captured, BATCH)))
        times = sorted(medians)
        return Timing(statistics.median(times), times[0], times[-1], BATCH * len(times))

    def _time(self, captured: CapturedGraph) -> Timing:
        self.engine.driver.synchronize()
        time.sleep(REST)
        self._run(captured, WARM)
        times = self._run(captured, RUNS)
        return Timing(statistics.median(times), times[0], times[-1], RUNS)

    def _run(self, captured: CapturedGraph, count: int) -> list[float]:
        """Milliseconds of `count` back-to-back runs, sorted."""
        for _ in range(count):
            captured.run()
        self.engine.driver.synchronize()
        captured.ended(count)
        return sorted(1e3 * t for t in captured.collect())

    def at(self, length: int, accepted: int) -> None:
        """Set the sequence to a context of `length` with `accepted` rows to fold."""
        names = [n for n in ("verify", "propose", "observe") if n in self.model.graphs]
        for name in (*names, *self.extra):
            inputs = self.call(name).inputs
            for port, value in self._counters(inputs, length, accepted):
                self.engine.write(inputs[port], np.array([value], np.int32))
            for port in ("tokens", "following"):
                if port in inputs:
                    rows = inputs[port].spec.at({})[0]
                    self.engine.write(inputs[port], self._ids(length, rows))
            if "block_ids" in inputs:
                self.engine.write(
                    inputs["block_ids"], np.array([1, *[-1] * (self.block - 1)], np.int32)
                )
        # An excerpt, when replayed, does not send what the host wrote; a read does.
        self.engine.read(self.call("verify").inputs["length"])

    @staticmethod
    def _counters(
        inputs: Mapping[str, Tensor], length: int, accepted: int
    ) -> Iterator[tuple[str, int]]:
        """The inputs that say where a step is, and their values."""
        own = {"length": length, "accepted": accepted, "last": 1}
        own |= {"drafter.length": length - accepted + 1, "drafter.row": accepted - 1}
        own |= {f"drafter.length.{step}": length + step for step in range(1, accepted + 1)}
        return ((port, value) for port, value in own.items() if port in inputs)

    def fill_state(self) -> None:
        """Fill caches, rings and states with ordinary numbers: zeros make memory faster, and NaN,
        which excerpts leave behind, makes products faster.
        """
        driver = self.engine.driver
        for seed, (name, tensor) in enumerate(sorted(self.model.state.tensors.items())):
            launch = _ordinary(driver.info.device, name, tensor.spec, seed)
            self.runner.run(ROOT / "standard" / "fill.cu", launch, {"to": cuda(tensor).now})
        driver.synchronize()

    def prefill(self, tokens: int) -> float:
        """Seconds to prefill a prompt, including the drafter's observe steps."""
        chunk = self.model.chunk
        ids = self._ids(1, tokens).tolist()
        best: list[float] = []
        for _ in range(4):
            self.model.state.reset()
            self.engine.driver.synchronize()
            start = time.perf_counter()
            for at in range(0, tokens, chunk):
                self.model.prefill(ids[at : at + chunk], observe=True)
            best.append(time.perf_counter() - start)
        return statistics.median(best[1:])

    def loop(self, prompt: int, cycles: int) -> LoopTiming:
        """Time cycles of the real loop."""
        ids = tuple(self._ids(2, prompt).tolist())
        most = 10**6
        request = DecodeRequest(
            prompt=ids,
            max_tokens=most,
            max_answer=most,
            stop=(),
            proposer=own_drafter(self.model.manifest),
            policies=(),
        )
        meter = RequestMeter(self.model.block, self.engine.busy())
        clock: list[float] = []
        graph: list[float] = []
        chunks = decode(self.model, request, DecodeProgress(ids), meter)
        for chunk in chunks:
            if not chunk.tokens:
                continue
            clock.append(time.perf_counter())
            # Not in every cycle: `busy` takes time that the loop otherwise overlaps with the next
            # cycle.
            if len(clock) == WARM + 1:
                self.engine.busy()
                graph = self.engine.note()
            if len(clock) == WARM + 1 + cycles:
                break
        chunks.close()  # type: ignore[attr-defined]
        self.engine.busy()
        took = [end - start for start, end in itertools.pairwise(clock[WARM:])]
        host = [whole - part for whole, part in zip(took, graph, strict=True)]
        return LoopTiming(
            statistics.median(took),
            statistics.median(graph),
            statistics.median(host),
            statistics.mean(host),
        )

    def _ids(self, seed: int, count: int) -> Array:
        """Random token ids of the target."""
        vocab = self.model.manifest.target.vocab
        return np.random.default_rng(seed).integers(1, vocab, count, np.int32)


def open_bench(
    engine: CudaEngine, manifest: Manifest, capacity: int, widths: Sequence[int], cubins: Path
) -> CudaBench:
    """Load a package, with verify steps of other widths besides its own."""
    extra = {f"verify.{width}": _other(engine, f"verify.{width}") for width in widths}
    engine.also(list(extra.values()))
    model = ModelRunner(engine, manifest, capacity, manifest.block)
    bench = CudaBench(engine, model, LaunchRunner(engine.driver, cubins), extra, 0)
    bench.fill_state()
    bench.free = engine.driver.free_memory()
    return bench


def _other(engine: CudaEngine, name: str) -> Call:
    graph = engine.load(name)
    tensors: dict[str, Tensor] = {}
    for spec in (*graph.inputs.values(), *graph.outputs.values()):
        key = spec.name.removeprefix(NEXT)
        if key not in tensors:
            tensors[key] = engine.empty(spec, {"cache_rows": TILE})
    return Call(
        graph,
        {n: tensors[n] for n in graph.inputs},
        {n: tensors[n.removeprefix(NEXT)] for n in graph.outputs},
    )


def _ordinary(device: Device, name: str, spec: TensorSpec, seed: int) -> Launch:
    size = spec.nbytes({})
    mean, deviation = STATE.get(name.rpartition(".")[2], (0.0, 1.0))
    if spec.dtype is DType.FP8:
        return fill.fp8(device, size, seed)
    if spec.dtype is DType.F32:
        return fill.f32(device, size // 4, seed, mean, deviation)
    return fill.bf16(device, size // 2, seed, mean, deviation)
