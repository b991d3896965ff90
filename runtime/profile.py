"""Where each millisecond of a request goes: the same request many times, side by side."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from thor_dflash.runtime.telemetry import Report, Spec

UNSTEADY = 0.025
"""Of a spread's variation, above which a median says little. Source: trtexec warns there."""
STRETCHES = 12
"""Of a soak, at most."""
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
    machine: Mapping[str, str]
    """Release and power mode of a Jetson; of other machines nothing."""

    def differs(self, other: Subject) -> list[str]:
        """What is not the same, in words."""
        one, two = ({**_plain(s), **s.machine, **s.settings} for s in (self, other))
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
    """One number many times. A percentile is the smallest that so many do not exceed."""

    low: float
    median: float
    p90: float
    p99: float
    high: float
    variation: float
    """Standard deviation over mean."""
    values: tuple[float, ...]
    """All of them, in the order in which they came."""


@dataclass(frozen=True, slots=True)
class Beat:
    """A moment of an answer: a step of its prompt or a cycle was over."""

    ms: float
    """Since the request."""
    tokens: int
    """Committed, a stop token included; 0 while the prompt is read."""


@dataclass(frozen=True, slots=True)
class Run:
    """One answer."""

    report: Report
    tokens: tuple[int, ...]
    beats: tuple[Beat, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A graph of a cycle, or the calls of one that are alike, run by itself."""

    graph: str
    name: str
    """Empty: the whole graph."""
    ms: float
    nbytes: int
    """That it cannot do without: weights; keys and values; states, read and written. 0: nobody
    counts them."""


@dataclass(frozen=True, slots=True)
class Inside:
    """A cycle taken apart. Parts that run by themselves do not overlap as they do in a cycle, so
    that their sum is not quite its time.
    """

    context: int
    """Tokens in the state."""
    cycle_ms: float
    """All graphs of the cycle as one."""
    read_rate: float
    """Bytes a second that this device reads in a long stream; 0 where the weights are too few to
    tell."""
    parts: tuple[Part, ...]
    """A graph, then what is in it."""


@dataclass(frozen=True, slots=True)
class Rail:
    """Power of one rail of the board."""

    name: str
    idle_w: float
    """Mean, before the first answer."""
    mean_w: float
    """While answers were made."""
    joules: float
    """Of an answer, median; what the board takes when idle is part of it."""


@dataclass(frozen=True, slots=True)
class Power:
    """What the board's sensors say meanwhile."""

    rails: tuple[Rail, ...] = ()
    """Empty where nobody may read any."""
    hottest_c: float | None = None
    """Highest junction temperature, degrees Celsius; None where nobody may read it."""
    failed: str = ""
    """Why a sensor was not read to the end."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Answers that followed each other, of a soak."""

    start_s: float
    """Since the first answer that counts."""
    end_s: float
    runs: int
    cycle_ms: float
    """Of a run, median; so is the next."""
    tok_s: float
    watts: Mapping[str, float]
    """Mean by rail, while answers were made; empty where nobody may read any."""
    hottest_c: float | None = None
    """As in Power."""


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
    timeline: tuple[Beat, ...]
    """Of the last run."""
    power: Power
    warnings: tuple[str, ...]
    inside: Inside | None = None
    """None where every graph of a cycle is a phase already, or where it cannot be taken apart."""
    soak: tuple[Stretch, ...] = ()
    """In order; empty where a number of runs was asked for."""


def spread(values: Sequence[float]) -> Spread:
    """Of at least one number."""
    ordered = sorted(values)
    mean = statistics.fmean(ordered)
    deviation = statistics.stdev(ordered) if len(ordered) > 1 else 0.0

    def at(percent: int) -> float:
        return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]

    variation = deviation / mean if mean else 0.0
    return Spread(ordered[0], at(50), at(90), at(99), ordered[-1], variation, tuple(values))


def cycles(beats: Sequence[Beat]) -> list[float]:
    """What each cycle of an answer took by the clock, ms."""
    return [end.ms - start.ms for start, end in itertools.pairwise(beats) if end.tokens]


def profile(
    subject: Subject,
    warmup: int,
    runs: Sequence[Run],
    *,
    inside: Inside | None = None,
    power: Power | None = None,
    soak: Sequence[Stretch] = (),
    notes: Sequence[str] = (),
) -> Profile:
    """Of the runs that count. `notes`: what else a reader should know."""
    power = power or Power()
    reports = [run.report for run in runs]
    times = {
        "ttft_ms": spread([r.timings.ttft_ms for r in reports]),
        "prefill_ms": spread([r.timings.prefill_ms for r in reports]),
        "cycle_ms": spread([_cycle_ms(r) for r in reports]),
        "each_ms": spread([ms for run in runs for ms in cycles(run.beats)]),
        "e2e_ms": spread([r.timings.e2e_ms for r in reports]),
        "tok_s": spread([r.timings.tok_s for r in reports]),
    }
    last = runs[-1]
    return Profile(
        subject,
        len(runs),
        warmup,
        len(last.tokens),
        last.report.finish,
        times,
        _phases(reports),
        last.report.spec,
        last.beats,
        power,
        (*_warnings(times, runs, power.failed), *_drift(soak), *notes),
        inside,
        tuple(soak),
    )


def stretches(
    runs: Sequence[Run],
    when: Sequence[tuple[float, float]],
    power: Callable[[Sequence[tuple[float, float]]], Power],
) -> list[Stretch]:
    """Runs that followed each other, in groups of nearly the same number.

    Args:
        runs: At least one.
        when: Beginning and end of each, s of one clock.
        power: Says what the board took during some of them.
    """
    count = min(STRETCHES, len(runs))
    bounds = [len(runs) * i // count for i in range(count + 1)]
    found: list[Stretch] = []
    for begin, end in itertools.pairwise(bounds):
        reports = [run.report for run in runs[begin:end]]
        taken = power(when[begin:end])
        found.append(
            Stretch(
                when[begin][0] - when[0][0],
                when[end - 1][1] - when[0][0],
                len(reports),
                statistics.median(_cycle_ms(r) for r in reports),
                statistics.median(r.timings.tok_s for r in reports),
                {rail.name: rail.mean_w for rail in taken.rails},
                taken.hottest_c,
            )
        )
    return found


def _cycle_ms(report: Report) -> float:
    return report.timings.decode_ms / max(1, report.spec.cycles)


def _phases(reports: Sequence[Report]) -> dict[str, Phase]:
    whole = sum(r.timings.e2e_ms for r in reports) or 1.0
    names = dict.fromkeys(name for r in reports for name in r.timings.phases_ms)
    found: dict[str, Phase] = {}
    for name in sorted(names, key=lambda n: (n == HOST, not n.startswith(PROMPT))):
        each = [r.timings.phases_ms.get(name, 0.0) for r in reports]
        shares = [ms / max(1, r.spec.cycles) for ms, r in zip(each, reports, strict=True)]
        once = name == HOST or name.startswith(PROMPT)
        cycle = 0.0 if once else statistics.median(shares)
        found[name] = Phase(statistics.median(each), cycle, sum(each) / whole)
    return found


def _drift(soak: Sequence[Stretch]) -> list[str]:
    if not soak or abs(drift := soak[-1].cycle_ms / soak[0].cycle_ms - 1) <= UNSTEADY:
        return []
    return [
        f"a cycle took {abs(drift):.1%} {'longer' if drift > 0 else 'less'} at the end of the soak "
        "than at its beginning: something else runs here, or clocks change with heat (doctor tells "
        "them)"
    ]


def _warnings(times: Mapping[str, Spread], runs: Sequence[Run], failed: str) -> list[str]:
    told: list[str] = []
    if (variation := times["cycle_ms"].variation) > UNSTEADY:
        told.append(
            f"a cycle varies by {variation:.2%} from run to run, more than {UNSTEADY:.1%}: "
            "something else runs here, or clocks are not fixed (doctor says how)"
        )
    if len({run.tokens for run in runs}) > 1:
        told.append("runs gave different answers: the gate chooses by the clock, or this is a bug")
    if runs[-1].report.finish == "length":
        told.append("the answer was cut by decode.max_tokens")
    if failed:
        told.append(f"power and temperature are not of all answers: {failed}")
    return told
