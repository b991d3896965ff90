"""Times launches in their place: in a captured chain of the launches around them, one after the
other with dependent launch, each layer with weights of its own, so that rows come from the caches
and weights from memory.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from thor_dflash.package.launch_program import Program, Step
from thor_dflash.plugins.launch import CallSite, Choice, Device, Launch
from thor_dflash.plugins.linear.decode_launch import MOST_ROWS
from thor_dflash.plugins.registry import KERNELS, ROOT
from thor_dflash.plugins.standard import fill
from thor_dflash.runtime.engines.cuda.engine import LaunchTrial
from thor_dflash.runtime.engines.protocol import Call
from thor_dflash.runtime.measure.cuda_bench import CudaBench
from thor_dflash.runtime.measure.launch_search import Times

CHAINED = frozenset(
    {"linear", "head", "gdn", "verify_attention", "draft_attention", "context_kv", "draft_conv"}
)
"""Operators that may be part of a chain: none takes an index from another's result, which outside
of its graph would be any number."""
NEAR, NEAR_PROMPT = 3, 1
"""Steps of a chain before and after each launch that is measured; in a step of a prompt, where a
launch takes so long that its neighbours matter less."""
PLACES, PLACES_PROMPT = 8, 2
"""Most launches of a chain that are measured, each in another layer; in a step of a prompt."""
FEWEST, RUNS = 2, 5
"""Fewest and most runs of a chain for one sample, after one that is not counted."""
SAMPLE_S = 0.01
"""Seconds of runs that are enough for a sample: a longer chain has less noise."""
CONTEXT, LONG = 2048, 16384
"""Tokens in the cache. Launches whose work grows with the context are measured at both."""
GROWS = ("verify_attention", "draft_attention")


@dataclass(frozen=True, slots=True, eq=False)
class TunableLaunch:
    """Calls with the same launches, of one graph, where the rule has a choice."""

    name: str
    call: Call
    site: CallSite
    steps: tuple[Step, ...]
    """The chain in which it is measured."""
    count: int
    """Calls of the graph."""
    places: int
    """Those in the chain."""
    choices: tuple[Choice, ...]
    """By the rule's estimates, its own first."""

    @property
    def key(self) -> str:
        """The key of the calls."""
        return self.site.key

    @property
    def nbytes(self) -> int:
        """Bytes of weights of all calls."""
        packed = self.site.ports.get("packed")
        return self.count * packed.nbytes if packed else 0


def tunable(bench: CudaBench, device: Device) -> list[TunableLaunch]:
    """The launches of a bench's calls for which there is a choice, those of a cycle first, those
    that read most weights first.
    """
    found: dict[str, TunableLaunch] = {}
    calls = bench.engine.replay.bound
    order = ("verify", "propose", "observe")
    for call in sorted(calls, key=lambda call: (call.graph.name not in order, call.graph.name)):
        here: dict[str, list[int]] = {}
        bound = calls[call]
        for i, site in enumerate(bound.sites):
            here.setdefault(site.key, []).append(i)
        for key, at in here.items():
            site = bound.sites[at[0]]
            if key in found or site.op.name not in CHAINED:
                continue
            choices = KERNELS[site.op.name].candidates(site, device, None)
            if len(choices) > 1:
                found[key] = _launch(call, bound.program, site, at, choices)
    ordered = sorted(found.values(), key=lambda one: -one.nbytes)
    return sorted(ordered, key=lambda one: one.call.graph.name.partition(".")[0] not in order)


def _launch(
    call: Call,
    program: Program,
    site: CallSite,
    at: Sequence[int],
    choices: tuple[Choice, ...],
) -> TunableLaunch:
    prompt = site.op.name == "linear" and site.size("x", 0) > MOST_ROWS
    places, reach = (PLACES_PROMPT, NEAR_PROMPT) if prompt else (PLACES, NEAR)
    near = {i for n in at[:places] for i in range(n - reach, n + reach + 1)}
    steps = tuple(step for i, step in enumerate(program.steps) if i in near and step.op in CHAINED)
    measured = {program.steps[i].name for i in at}
    kind = re.sub(r"\b\d+\b", "*", program.steps[at[0]].name)
    count = sum(step.name in measured for step in steps)
    return TunableLaunch(f"{program.name}: {kind}", call, site, steps, len(at), count, choices)


class ChainTimer:
    """Times the launches of a bench. Leaves meaningless values in all states."""

    def __init__(self, bench: CudaBench) -> None:
        self._bench = bench
        self._engine = bench.engine

    def launches(self, one: TunableLaunch, device: Device) -> Iterator[tuple[Path, Launch]]:
        """What the kernels of a launch are compiled from."""
        rule = KERNELS[one.site.op.name]
        for launch in rule.launches(one.site, device):
            yield rule.source(launch), launch

    def active_clusters(self, one: TunableLaunch, launch: Launch) -> int:
        """How many clusters of a launch the device runs at the same time, by the driver."""
        source = KERNELS[one.site.op.name].source(launch)
        return self._engine.kernels.active_clusters(source, launch)

    def trials(
        self, one: TunableLaunch, device: Device, choices: Sequence[Choice]
    ) -> list[LaunchTrial]:
        """Capture the chain with each choice, the other launches by `device`."""
        self._bench.fill_state()
        made: list[LaunchTrial] = []
        for choice in choices:
            made.append(self._engine.trial(one.call, one.steps, device.choosing(one.site, choice)))
        return made

    def contexts(self, one: TunableLaunch) -> tuple[int, ...]:
        """The contexts in which a launch is measured, tokens."""
        most = max(1, self._bench.model.limit - self._rows(one.call))
        grows = one.site.op.name in GROWS
        return tuple(dict.fromkeys(min(n, most) for n in (CONTEXT, *([LONG] if grows else []))))

    def sample(self, one: TunableLaunch, trial: LaunchTrial, contexts: Sequence[int]) -> Times:
        """Microseconds of the chain for each launch in it that is measured, by context."""
        found: list[float] = []
        for length in contexts:
            self.place(one.call, length)
            self._fill_values()
            [first] = self._run(trial, 1)
            runs = max(FEWEST, min(RUNS, int(SAMPLE_S / first)))
            found.append(statistics.median(self._run(trial, runs)) * 1e6 / one.places)
        return tuple(found)

    def place(self, call: Call, length: int) -> None:
        """Set the sequence to a context of `length`, for a step with all its rows."""
        self._bench.at(length, self._bench.block)
        if "valid" in call.inputs:
            rows = np.array([self._rows(call)], np.int32)
            self._engine.write(call.inputs["valid"], rows)
            self._engine.read(call.inputs["valid"])  # sends it

    def _rows(self, call: Call) -> int:
        """Rows of a step."""
        for port in ("tokens", "taps"):
            if port in call.inputs:
                return call.inputs[port].spec.at({})[0]
        return self._bench.block

    def _fill_values(self) -> None:
        """Fill the memory of intermediate values with ordinary numbers: a chain that is repeated
        feeds its results back, and they would grow without end.
        """
        address, nbytes = self._engine.values
        if count := nbytes // 2:
            launch = fill.bf16(self._engine.info.device, count, 1, 0.0, 1.0)
            self._bench.runner.run(ROOT / "standard" / "fill.cu", launch, {"to": address})

    def _run(self, trial: LaunchTrial, count: int) -> list[float]:
        for _ in range(count):
            trial.captured.run()
        self._engine.driver.synchronize()
        trial.captured.ended(count)
        return trial.captured.collect()
