"""Where each millisecond of a request goes: statistics of many runs of the same request."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from thor_dflash.core.errors import RequestError
from thor_dflash.core.results import Speculation
from thor_dflash.runtime.decoding.telemetry import RequestReport

UNSTEADY = 0.025
"""Coefficient of variation above which a median is unreliable. Source: trtexec warns above it."""
STRETCHES = 12
"""Maximum stretches of a soak."""
PROMPT = ("prefill", "observe_chunk")
"""Name prefixes of the graphs that read a prompt; the others run once per cycle."""
HOST = "host"


@dataclass(frozen=True, slots=True)
class ProfileSubject:
    """What was measured. Profiles are comparable if all of it but the version is the same."""

    version: str
    """Version of thor-dflash."""
    package: str
    """sha256 of its manifest, with the hashes of its weights, but without when, where and
    by which version it was built.
    """
    engine: str
    device: str
    prompt: str
    """sha256 of the prompt's token ids."""
    prompt_tokens: int
    settings: Mapping[str, str]
    """Settings of engine and decode, by dotted name: drafter, context, block and prefill step as
    they were used. Of a schema the beginning of its sha256.
    """
    machine: Mapping[str, str]
    """Release and power mode of a Jetson; empty for other machines."""

    def differs(self, other: ProfileSubject) -> list[str]:
        """The differences from a later subject, as text."""
        one, two = ({**_plain(s), **s.machine, **s.settings} for s in (self, other))
        return [
            f"{key} {one.get(key, 'nothing')}, now {two.get(key, 'nothing')}"
            for key in dict.fromkeys((*one, *two))
            if one.get(key) != two.get(key)
        ]


def _plain(subject: ProfileSubject) -> dict[str, str]:
    """The fields that are not settings, with hashes shortened."""
    return {
        "package": subject.package[:12],
        "engine": subject.engine,
        "device": subject.device,
        "prompt": subject.prompt[:12],
    }


@dataclass(frozen=True, slots=True)
class Spread:
    """Statistics of one number over many runs. A percentile is the smallest value that at least
    that share of the values does not exceed.
    """

    low: float
    median: float
    p90: float
    p99: float
    high: float
    variation: float
    """Standard deviation over mean."""
    values: tuple[float, ...]
    """All values, in the order they were measured."""


@dataclass(frozen=True, slots=True)
class StepEnd:
    """The end of a prefill step or of a cycle of an answer."""

    ms: float
    """Time since the request."""
    tokens: int
    """Tokens committed, a stop token included; 0 while the prompt is read, and at a dead end."""


@dataclass(frozen=True, slots=True)
class ProfileRun:
    """One answer."""

    report: RequestReport
    tokens: tuple[int, ...]
    beats: tuple[StepEnd, ...]


@dataclass(frozen=True, slots=True)
class ProfilePart:
    """A graph of a cycle, or a group of similar calls in one, timed by itself."""

    graph: str
    name: str
    """Empty: the whole graph."""
    ms: float
    nbytes: int
    """Bytes it must move: weights; keys and values; states, read and written. 0: not counted."""


@dataclass(frozen=True, slots=True)
class CycleBreakdown:
    """The parts of a cycle. Parts timed by themselves do not overlap as they do in a cycle, so
    their sum is not exactly its time.
    """

    context: int
    """Tokens in the state."""
    cycle_ms: float
    """Time of all graphs of the cycle run as one."""
    read_rate: float
    """Bytes per second that this device reads in a long stream; 0 if there are too few weights to
    measure it."""
    parts: tuple[ProfilePart, ...]
    """Each graph, followed by its parts."""


@dataclass(frozen=True, slots=True)
class Rail:
    """Power of one rail of the board."""

    name: str
    idle_w: float
    """Mean power before the first answer."""
    mean_w: float
    """Mean power during answers."""
    joules: float
    """Median energy of an answer, including the board's idle power."""


@dataclass(frozen=True, slots=True)
class Power:
    """What the board's sensors measured during the runs."""

    rails: tuple[Rail, ...] = ()
    """Empty if none can be read."""
    hottest_c: float | None = None
    """Highest junction temperature, degrees Celsius; None if it cannot be read."""
    failed: str = ""
    """Why sampling stopped early; empty if it did not."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive answers of a soak."""

    start_s: float
    """Since the first measured answer, as is the next."""
    end_s: float
    runs: int
    cycle_ms: float
    """Median over the runs, as is the next."""
    tok_s: float
    watts: Mapping[str, float]
    """Mean power by rail during answers; empty if none can be read."""
    hottest_c: float | None = None
    """As in Power."""


@dataclass(frozen=True, slots=True)
class ProfilePhase:
    """A graph of the loop; or the host, which is all remaining time."""

    ms: float
    """Median time per request."""
    cycle_ms: float
    """Median time per cycle; 0 for the host and for graphs that read the prompt."""
    share: float
    """Share of the time of all requests."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Measurements of one request, run many times."""

    subject: ProfileSubject
    runs: int
    warmup: int
    """Earlier runs, which are not measured."""
    tokens: int
    """Tokens of the answer."""
    finish: str
    times: Mapping[str, Spread]
    """ttft_ms, prefill_ms, cycle_ms, each_ms (every cycle by the clock), e2e_ms; tok_s."""
    phases: Mapping[str, ProfilePhase]
    spec: Speculation
    """Of the last run."""
    timeline: tuple[StepEnd, ...]
    """Of the last run."""
    power: Power
    warnings: tuple[str, ...]
    inside: CycleBreakdown | None = None
    """None if every graph of a cycle is already a phase, or if the cycle cannot be taken apart."""
    soak: tuple[Stretch, ...] = ()
    """In order; empty if a number of runs was requested."""


def spread(values: Sequence[float]) -> Spread:
    """The statistics of at least one number."""
    ordered = sorted(values)
    mean = statistics.fmean(ordered)
    deviation = statistics.stdev(ordered) if len(ordered) > 1 else 0.0

    def at(percent: int) -> float:
        return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]

    variation = deviation / mean if mean else 0.0
    return Spread(ordered[0], at(50), at(90), at(99), ordered[-1], variation, tuple(values))


def cycles(beats: Sequence[StepEnd]) -> list[float]:
    """Wall time of each cycle of an answer, ms."""
    return [end.ms - start.ms for start, end in itertools.pairwise(beats) if end.tokens]


def profile(
    subject: ProfileSubject,
    warmup: int,
    runs: Sequence[ProfileRun],
    *,
    inside: CycleBreakdown | None = None,
    power: Power | None = None,
    soak: Sequence[Stretch] = (),
    notes: Sequence[str] = (),
) -> Profile:
    """The profile of the measured runs. `notes`: further remarks for the reader.

    Raises:
        RequestError: no answer has a token.
    """
    power = power or Power()
    reports = [run.report for run in runs]
    each = [ms for run in runs for ms in cycles(run.beats)]
    if not each:
        raise RequestError(
            f"an answer that is profiled must have a token (got {reports[-1].finish} before any)"
        )
    times = {
        "ttft_ms": spread([r.timings.ttft_ms for r in reports]),
        "prefill_ms": spread([r.timings.prefill_ms for r in reports]),
        "cycle_ms": spread([_cycle_ms(r) for r in reports]),
        "each_ms": spread(each),
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


def steps(found: Profile) -> Iterator[tuple[str, StepEnd, StepEnd]]:
    """What each step of the last answer was, its start and its end."""
    for start, end in itertools.pairwise(found.timeline):
        # Only a dead end commits nothing after the prompt.
        last = end is found.timeline[-1]
        yield "cycle" if end.tokens else "dead end" if last else "prompt", start, end


def stretches(
    runs: Sequence[ProfileRun],
    when: Sequence[tuple[float, float]],
    power: Callable[[Sequence[tuple[float, float]]], Power],
) -> list[Stretch]:
    """Group consecutive runs into stretches of nearly equal size.

    Args:
        runs: At least one.
        when: Beginning and end of each, s of one clock.
        power: Returns the board's power during some of them.
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
                statistics.median_low(_cycle_ms(r) for r in reports),
                statistics.median_low(r.timings.tok_s for r in reports),
                {rail.name: rail.mean_w for rail in taken.rails},
                taken.hottest_c,
            )
        )
    return found


def _cycle_ms(report: RequestReport) -> float:
    return report.timings.decode_ms / max(1, report.spec.cycles)


def _phases(reports: Sequence[RequestReport]) -> dict[str, ProfilePhase]:
    whole = sum(r.timings.e2e_ms for r in reports) or 1.0
    names = dict.fromkeys(name for r in reports for name in r.phases_ms)
    found: dict[str, ProfilePhase] = {}
    for name in sorted(names, key=lambda n: (n == HOST, not n.startswith(PROMPT))):
        each = [r.phases_ms.get(name, 0.0) for r in reports]
        shares = [ms / max(1, r.spec.cycles) for ms, r in zip(each, reports, strict=True)]
        once = name == HOST or name.startswith(PROMPT)
        cycle = 0.0 if once else statistics.median_low(shares)
        found[name] = ProfilePhase(statistics.median_low(each), cycle, sum(each) / whole)
    return found


def _drift(soak: Sequence[Stretch]) -> list[str]:
    if not soak or abs(drift := soak[-1].cycle_ms / soak[0].cycle_ms - 1) <= UNSTEADY:
        return []
    return [
        f"a cycle took {abs(drift):.1%} {'longer' if drift > 0 else 'less'} at the end of the soak "
        "than at its beginning: something else runs here, or clocks change with heat (see "
        "`thor-dflash doctor`)"
    ]


def _warnings(times: Mapping[str, Spread], runs: Sequence[ProfileRun], failed: str) -> list[str]:
    warnings: list[str] = []
    if (variation := times["cycle_ms"].variation) > UNSTEADY:
        warnings.append(
            f"a cycle varies by {variation:.2%} from run to run, more than {UNSTEADY:.1%}: "
            "something else runs here, or clocks are not fixed (see `thor-dflash doctor`)"
        )
    if len({run.tokens for run in runs}) > 1:
        warnings.append(
            "runs gave different answers: the gate chooses by the clock, or this is a bug"
        )
    if runs[-1].report.finish == "length":
        warnings.append("the answer was cut by decode.max_tokens")
    if failed:
        warnings.append(f"power and temperature are not of all answers: {failed}")
    return warnings
