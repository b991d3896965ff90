"""Where each millisecond of a request goes: the same request many times, side by side."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thor_dflash.runtime.telemetry import Report, Spec

UNSTEADY = 0.025
"""Of a spread's variation, above which a median says little. Source: trtexec warns there."""
PROMPT = ("prefill", "observe_chunk")
"""Beginnings of the names of graphs that read a prompt; the others run once a cycle."""
HOST = "host"


@dataclass(frozen=True, slots=True)
class Subject:
    """What was measured. Profiles compare where all of it but the version is the same."""

    version: str
    """Of thor-dflash."""
    package: str
    """sha256 of its manifest, which holds the hashes of its files."""
    engine: str
    device: str
    prompt: str
    """sha256 of its token ids."""
    prompt_tokens: int
    settings: Mapping[str, str]
    """Of engine and decode, by dotted name."""

    def differs(self, other: Subject) -> list[str]:
        """What is not the same, in words."""
        one, two = ({**_plain(s), **s.settings} for s in (self, other))
        return [
            f"{key} {two.get(key, 'nothing')}, not {one.get(key, 'nothing')}"
            for key in dict.fromkeys((*one, *two))
            if one.get(key) != two.get(key)
        ]


def _plain(subject: Subject) -> dict[str, str]:
    """What is not a setting; of hashes enough to tell them apart."""
    return {
        "package": subject.package[:12],
        "engine": subject.engine,
        "device": subject.device,
        "prompt": subject.prompt[:12],
    }


@dataclass(frozen=True, slots=True)
class Spread:
    """One number over all runs. A percentile is the smallest that so many do not exceed."""

    low: float
    median: float
    p90: float
    p99: float
    high: float
    variation: float
    """Standard deviation over mean."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A graph of the loop; or the host, which is all the rest."""

    ms: float
    """Of a request, median."""
    cycle_ms: float
    """Of a cycle; 0 of what reads the prompt."""
    share: float
    """Of the time of all requests."""


@dataclass(frozen=True, slots=True)
class Profile:
    """One request, many times."""

    subject: Subject
    runs: int
    warmup: int
    """Runs before, which do not count."""
    tokens: int
    """Of the answer."""
    finish: str
    times: Mapping[str, Spread]
    """ttft_ms, prefill_ms, cycle_ms, e2e_ms; tok_s."""
    phases: Mapping[str, Phase]
    spec: Spec
    """Of the last run."""
    warnings: tuple[str, ...]


def spread(values: Sequence[float]) -> Spread:
    """Of at least one number."""
    ordered = sorted(values)
    mean = statistics.fmean(ordered)
    deviation = statistics.stdev(ordered) if len(ordered) > 1 else 0.0

    def at(percent: int) -> float:
        return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]

    variation = deviation / mean if mean else 0.0
    return Spread(ordered[0], at(50), at(90), at(99), ordered[-1], variation)


def profile(
    subject: Subject, warmup: int, reports: Sequence[Report], answers: Sequence[tuple[int, ...]]
) -> Profile:
    """Of the runs that count: what each reported, and its tokens."""
    times = {
        "ttft_ms": spread([r.timings.ttft_ms for r in reports]),
        "prefill_ms": spread([r.timings.prefill_ms for r in reports]),
        "cycle_ms": spread([r.timings.decode_ms / max(1, r.spec.cycles) for r in reports]),
        "e2e_ms": spread([r.timings.e2e_ms for r in reports]),
        "tok_s": spread([r.timings.tok_s for r in reports]),
    }
    last = reports[-1]
    return Profile(
        subject,
        len(reports),
        warmup,
        len(answers[-1]),
        last.finish,
        times,
        _phases(reports),
        last.spec,
        tuple(_warnings(times, reports, answers)),
    )


def _phases(reports: Sequence[Report]) -> dict[str, Phase]:
    whole = sum(r.timings.e2e_ms for r in reports) or 1.0
    names = dict.fromkeys(name for r in reports for name in r.timings.phases_ms)
    found: dict[str, Phase] = {}
    for name in sorted(names, key=lambda n: (n == HOST, not n.startswith(PROMPT))):
        each = [r.timings.phases_ms.get(name, 0.0) for r in reports]
        cycles = [ms / max(1, r.spec.cycles) for ms, r in zip(each, reports, strict=True)]
        once = name == HOST or name.startswith(PROMPT)
        cycle = 0.0 if once else statistics.median(cycles)
        found[name] = Phase(statistics.median(each), cycle, sum(each) / whole)
    return found


def _warnings(
    times: Mapping[str, Spread], reports: Sequence[Report], answers: Sequence[tuple[int, ...]]
) -> list[str]:
    told: list[str] = []
    if (variation := times["cycle_ms"].variation) > UNSTEADY:
        told.append(
            f"a cycle varies by {variation:.1%} from run to run, more than {UNSTEADY:.1%}: "
            "something else runs here, or clocks are not fixed (doctor says how)"
        )
    if len(set(answers)) > 1:
        told.append("runs gave different answers: the gate chooses by the clock, or this is a bug")
    if reports[-1].finish == "length":
        told.append("the answer was cut by decode.max_tokens")
    return told
