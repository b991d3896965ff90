"""Profiles, the statistics of many runs of one request: spreads, phases, warnings, soaks, and
which profiles may be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from thor_dflash.core.errors import RequestError
from thor_dflash.core.results import Speculation, Timings, Usage
from thor_dflash.runtime.decoding.telemetry import RequestReport
from thor_dflash.runtime.measure.profile import (
    STRETCHES,
    Power,
    ProfileRun,
    ProfileSubject,
    Rail,
    StepEnd,
    cycles,
    profile,
    spread,
    stretches,
)

SUBJECT = ProfileSubject("1", "p" * 64, "ort", "CPU", "q" * 64, 5, {"decode.gate": "off"}, {})
BEATS = (StepEnd(0.0, 0), StepEnd(20.0, 0), StepEnd(30.0, 4), StepEnd(45.0, 1))


def report(e2e: float, cycles: int = 4, finish: str = "stop", **phases: float) -> RequestReport:
    host = e2e - sum(phases.values())
    return RequestReport(
        finish=finish,
        completion_tokens=10,
        usage=Usage(),
        timings=Timings(
            prefill_ms=e2e / 4, ttft_ms=e2e / 2, decode_ms=3 * e2e / 4, e2e_ms=e2e, tok_s=50.0
        ),
        phases_ms={**phases, "host": host},
        spec=Speculation(cycles=cycles, drafted=60, accepted=6, accept_len=2.5),
        phases={},
        close="",
        notes=(),
    )


def runs(*reports: RequestReport, answers: tuple[tuple[int, ...], ...] = ()) -> list[ProfileRun]:
    """One run for each report. All have the same answer unless `answers` are given."""
    return [
        ProfileRun(one, answer, BEATS)
        for one, answer in zip(reports, answers or ((1, 2),) * len(reports), strict=True)
    ]


# ---- spreads


@pytest.mark.parametrize("count", [1, 2, 3, 10, 15, 99, 100, 101])
def test_a_percentile_is_the_smallest_that_so_many_do_not_exceed(count: int) -> None:
    values = [float((i * 7919) % count) for i in range(count)]
    found = spread(values)
    for percent, value in ((50, found.median), (90, found.p90), (99, found.p99)):
        assert value in values
        assert 100 * sum(v <= value for v in values) >= percent * count
        assert 100 * sum(v < value for v in values) < percent * count
    assert (found.low, found.high) == (min(values), max(values))
    assert found.values == tuple(values)


def test_answers_without_a_token_have_no_profile() -> None:
    (run,) = runs(report(100.0, finish="grammar_dead_end"))
    reported = r"must have a token \(got grammar_dead_end before any\)"
    with pytest.raises(RequestError, match=reported):
        profile(SUBJECT, 0, [replace(run, beats=BEATS[:2])])


# ---- phases


def test_shares_add_up_and_what_reads_the_prompt_has_no_cycle() -> None:
    found = runs(
        report(100.0, verify=60.0, prefill=20.0, observe_chunk=4.0),
        report(200.0, verify=120.0, prefill=40.0, **{"prefill.chunk128": 8.0}),
    )
    phases = profile(SUBJECT, 0, found).phases
    assert list(phases) == ["prefill", "observe_chunk", "prefill.chunk128", "verify", "host"]
    assert sum(phase.share for phase in phases.values()) == pytest.approx(1)
    assert phases["verify"].share == pytest.approx(0.6)
    assert (phases["verify"].ms, phases["verify"].cycle_ms) == (60.0, 15.0)
    for name in ("prefill", "observe_chunk", "prefill.chunk128", "host"):
        assert phases[name].cycle_ms == 0


def test_a_cycle_begins_where_the_step_before_ended_and_ends_with_tokens() -> None:
    assert cycles(BEATS) == [10.0, 15.0]
    assert cycles(BEATS[:2]) == []


# ---- notes


# ---- soaks


def long(*cycle_ms: float) -> tuple[list[ProfileRun], list[tuple[float, float]]]:
    """For each of these times per cycle, a run of four cycles, and its beginning and end in
    seconds: the first begins at 100 s, each lasts 10 s, and the next begins 1 s later.
    """
    reports = [report(4 * 4 / 3 * ms, cycles=4) for ms in cycle_ms]
    return runs(*reports), [(100.0 + 11 * i, 110.0 + 11 * i) for i in range(len(reports))]


def power(answers: Sequence[tuple[float, float]]) -> Power:
    """Power that shows which answers it was asked for: as watts, when the first of them began, and
    as degrees, when the last of them ended.
    """
    return Power((Rail("VIN", 1.0, answers[0][0], 1.0),), answers[-1][1])


@pytest.mark.parametrize("count", [1, 2, STRETCHES - 1, STRETCHES, STRETCHES + 1, 100])
def test_a_stretch_is_some_answers_that_followed_each_other(count: int) -> None:
    found = stretches(*long(*map(float, range(1, count + 1))), power)
    assert len(found) == min(count, STRETCHES)
    assert sum(s.runs for s in found) == count
    assert max(s.runs for s in found) - min(s.runs for s in found) <= 1
    first = 0
    for s in found:
        last = first + s.runs - 1
        assert (s.start_s, s.end_s) == (11.0 * first, 11.0 * last + 10)
        assert s.cycle_ms == pytest.approx((first + 1 + last + 1) // 2)
        assert s.watts == {"VIN": 100.0 + 11 * first}
        assert s.hottest_c == 110.0 + 11 * last
        first = last + 1


@pytest.mark.parametrize(
    ("end", "reported"),
    [(10.24, ""), (10.26, "2.6% longer"), (9.76, ""), (9.74, "2.6% less")],
)
def test_a_cycle_that_changes_in_a_soak_is_noted(end: float, reported: str) -> None:
    found, when = long(10.0, 5.0, 20.0, end)
    soak = stretches(found, when, power)
    notes = [n for n in profile(SUBJECT, 0, found, soak=soak).warnings if "soak" in n]
    assert [reported in note for note in notes] == ([True] if reported else [])
    assert profile(SUBJECT, 0, found, soak=soak).soak == tuple(soak)


# ---- comparing


def test_versions_may_differ_and_nothing_else() -> None:
    assert SUBJECT.differs(replace(SUBJECT, version="2")) == []
    settings = {"decode.gate": "on", "x": "1"}
    other = ProfileSubject(
        "1", "r" * 64, "cuda", "GPU", "s" * 64, 6, settings, {"power mode": "MAXN"}
    )
    assert SUBJECT.differs(other) == [
        "package pppppppppppp, now rrrrrrrrrrrr",
        "engine ort, now cuda",
        "device CPU, now GPU",
        "prompt qqqqqqqqqqqq, now ssssssssssss",
        "decode.gate off, now on",
        "power mode nothing, now MAXN",
        "x nothing, now 1",
    ]
