"""What the steps of a package cost on this device, and what they could cost at best."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from thor_dflash.manifest import Manifest
from thor_dflash.plugins.launch import At, Int, Launch
from thor_dflash.plugins.op import NEXT
from thor_dflash.plugins.rules import ROOT
from thor_dflash.plugins.standard import fill
from thor_dflash.plugins.verify_attention import TILE
from thor_dflash.program import Step
from thor_dflash.runtime.block import Progress
from thor_dflash.runtime.decode import Plan, decode
from thor_dflash.runtime.engine import Call, Tensor
from thor_dflash.runtime.engines.cuda.bound import cuda
from thor_dflash.runtime.engines.cuda.capture import Captured, Runner
from thor_dflash.runtime.engines.cuda.engine import CudaEngine
from thor_dflash.runtime.model import Model
from thor_dflash.runtime.propose import Dflash
from thor_dflash.runtime.telemetry import Meter
from thor_dflash.tensors import DType

BLOCK_BYTES = 512 * 8 * 16
"""Read by one block of read_memory at a time."""
WARM, RUNS = 3, 15
SECONDS = 0.25
"""Spent warming a step up, so that clocks have risen."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one step, milliseconds."""

    median: float
    low: float
    high: float
    runs: int


def everything(step: Step) -> bool:
    """Every step of a call."""
    del step
    return True


def rooms(*names: str) -> Callable[[Step], bool]:
    """The steps of some rooms."""
    return lambda step: step.room in names


@dataclass(slots=True)
class Bench:
    """One package on one engine."""

    engine: CudaEngine
    model: Model
    cubins: Path
    extra: dict[str, Call]
    """Verify steps of other widths, by name."""

    def bandwidth(self) -> float:
        """Read bandwidth, bytes a second: the weights themselves, read by the simplest kernel."""
        driver = self.engine.driver
        base, size = self.engine.weights
        runner = Runner(driver, self.cubins)
        blocks = min(size // BLOCK_BYTES, 2**31 - 1)
        launch = Launch(
            "read_memory",
            (driver.info.device.multiprocessors * 4, 1, 1),
            512,
            (At("from"), At("sink"), Int(blocks)),
        )
        at = {"from": base, "sink": cuda(self.call("verify").outputs["logits"]).now}

        def start() -> None:
            runner.run(ROOT / "cuda" / "bandwidth.cu", launch, at)

        timing = self._time(Captured("read", driver, start))
        return blocks * BLOCK_BYTES / timing.median * 1e3

    def call(self, name: str) -> Call:
        """A step of the model, or of another width."""
        return self.extra[name] if name in self.extra else self.model.call(name)

    def bytes(self, name: str, rooms_: Sequence[str]) -> int:
        """Weights that some rooms of a step read."""
        program = self.engine.program(name)
        used = {n for s in program.steps if s.room in rooms_ for n in s.ports.values()}
        return sum(w.nbytes for n, w in program.weights.items() if n in used)

    def cache_bytes(self) -> int:
        """Key/value cache a token takes."""
        caches = [t.spec for n, t in self.model.state.tensors.items() if n.startswith("attention.")]
        return sum(spec.nbytes({}) // spec.at({})[1] for spec in caches)

    def steps(self, names: Sequence[str], keep: Callable[[Step], bool] = everything) -> Timing:
        """Some steps of some graphs, one after the other in one CUDA graph."""
        return self._time(self.engine.excerpt([self.call(name) for name in names], keep))

    def _time(self, captured: Captured) -> Timing:
        driver = self.engine.driver
        end = time.perf_counter() + SECONDS
        runs = 0
        while runs < WARM or time.perf_counter() < end:
            captured.run()
            driver.synchronize()
            runs += 1
        captured.collect()
        for _ in range(RUNS):
            captured.run()
        driver.synchronize()
        times = sorted(1e3 * t for t in captured.collect())
        return Timing(statistics.median(times), times[0], times[-1], RUNS)

    def at(self, length: int, accepted: int) -> None:
        """Put the sequence at a context of `length` with `accepted` rows to fold."""
        for name in ("verify", "propose", "observe", *self.extra):
            inputs = self.call(name).inputs
            for port, value in (("length", length), ("accepted", accepted), ("last", 1)):
                if port in inputs:
                    self.engine.write(inputs[port], np.array([value], np.int32))
            if "tokens" in inputs:
                rows = inputs["tokens"].spec.at({})[0]
                ids = np.random.default_rng(length).integers(1, 200_000, rows)
                self.engine.write(inputs["tokens"], ids.astype(np.int32))

    def fill_state(self) -> None:
        """Ordinary numbers in caches and rings: memory is faster on zeros."""
        driver = self.engine.driver
        runner, device = Runner(driver, self.cubins), driver.info.device
        for seed, (name, tensor) in enumerate(sorted(self.model.state.tensors.items())):
            if name.startswith("gdn."):
                continue
            size = tensor.spec.nbytes({})
            if tensor.spec.dtype is DType.FP8:
                launch = fill.fp8(device, size, seed)
            else:
                launch = fill.bf16(device, size // 2, seed, 0.0, 1.0)
            runner.run(ROOT / "standard" / "fill.cu", launch, {"to": cuda(tensor).now})
        driver.synchronize()

    def prefill(self, tokens: int) -> float:
        """Seconds to read a prompt, the drafter looking on."""
        chunk = self.model.manifest.chunk
        ids = [int(i) for i in np.random.default_rng(1).integers(1, 200_000, tokens)]
        best: list[float] = []
        for _ in range(4):
            self.model.state.reset()
            start = time.perf_counter()
            for at in range(0, tokens, chunk):
                self.model.prefill(ids[at : at + chunk], observe=True)
            best.append(time.perf_counter() - start)
        return statistics.median(best[1:])

    def loop(self, prompt: int, cycles: int) -> tuple[float, float]:
        """Seconds of a cycle of the real loop: by the clock, and of that in the CUDA graph."""
        ids = tuple(int(i) for i in np.random.default_rng(2).integers(1, 200_000, prompt))
        plan = Plan(prompt=ids, max_tokens=10**6, stop=(), proposer=Dflash(), policies=())
        meter = Meter(self.model.block, self.engine.busy())
        clock: list[float] = []
        chunks = decode(self.model, plan, Progress(ids), meter)
        for chunk in chunks:
            if not chunk.tokens:
                continue
            if len(clock) == WARM:
                busy = sum(self.engine.busy().values())
            clock.append(time.perf_counter())
            if len(clock) == WARM + 1 + cycles:
                break
        graph = (sum(self.engine.busy().values()) - busy) / (cycles + 1)
        chunks.close()  # type: ignore[attr-defined]
        return (clock[-1] - clock[WARM]) / cycles, graph


def open_bench(
    engine: CudaEngine, manifest: Manifest, capacity: int, widths: Sequence[int], cubins: Path
) -> Bench:
    """Load a package with verify steps of other widths beside its own."""
    extra = {f"verify.{width}": _other(engine, f"verify.{width}") for width in widths}
    engine.also(list(extra.values()))
    bench = Bench(engine, Model(engine, manifest, capacity, manifest.block), cubins, extra)
    bench.fill_state()
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
