"""Profiles, the statistics of many runs of one request: spreads, phases, warnings, soaks, and
which profiles may be compared.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from thor_dflash.core import strict_records
from thor_dflash.core.errors import RequestError
from thor_dflash.core.results import Speculation, Timings, Usage
from thor_dflash.runtime.decoding.telemetry import RequestReport
from thor_dflash.runtime.measure.profile import (
    STRETCHES,
    Power,
    Profile,
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


def test_variation_is_deviation_over_mean() -> None:
    assert spread([9.0, 11.0]).variation == pytest.approx(2**0.5 / 10)
    assert spread([3.0]).variation == 0
    assert spread([0.0, 0.0]).variation == 0


def test_answers_without_a_token_have_no_profile() -> None:
    (run,) = runs(report(100.0, finish="grammar_dead_end"))
    told = r"must have a token \(got grammar_dead_end before any\)"
    with pytest.raises(RequestError, match=told):
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


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_median_is_the_percentile_of_50(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thor_dflash.runtime.measure.profile.STRETCHES", 1)
    spent = [100.0 + 10 * (3 * i % count) for i in range(count)]
    each = [report(ms, verify=ms / 2) for ms in spent]
    found = runs(*(replace(r, timings=replace(r.timings, tok_s=r.timings.e2e_ms)) for r in each))
    (stretch,) = stretches(found, [(i, i + 1) for i in range(count)], lambda _: Power())
    one = profile(SUBJECT, 0, found)
    assert one.phases["verify"].ms == spread([ms / 2 for ms in spent]).median
    assert one.phases["verify"].cycle_ms == spread([ms / 8 for ms in spent]).median
    assert stretch.cycle_ms == one.times["cycle_ms"].median
    assert stretch.tok_s == one.times["tok_s"].median


def test_the_host_is_last_also_where_an_earlier_run_had_fewer_phases() -> None:
    found = runs(report(100.0, prefill=20.0), report(100.0, prefill=20.0, verify=60.0))
    assert list(profile(SUBJECT, 0, found).phases) == ["prefill", "verify", "host"]


def test_the_numbers_of_an_answer() -> None:
    times = profile(SUBJECT, 3, runs(report(100.0, cycles=5))).times
    assert {name: s.median for name, s in times.items()} == {
        "ttft_ms": 50.0,
        "prefill_ms": 25.0,
        "cycle_ms": 15.0,
        "each_ms": 10.0,
        "e2e_ms": 100.0,
        "tok_s": 50.0,
    }


def test_a_cycle_begins_where_the_step_before_ended_and_ends_with_tokens() -> None:
    assert cycles(BEATS) == [10.0, 15.0]
    assert cycles(BEATS[:2]) == []


def test_each_cycle_of_each_run_counts() -> None:
    found = profile(SUBJECT, 0, runs(report(100.0), report(100.0)))
    assert found.times["each_ms"].values == (10.0, 15.0, 10.0, 15.0)
    assert found.timeline == BEATS


def test_what_is_shown_of_one_run_is_of_the_last() -> None:
    first, last = runs(
        report(100.0, cycles=5), report(100.0, finish="length"), answers=((1,), (2, 3))
    )
    found = profile(SUBJECT, 0, [replace(first, beats=BEATS[:3]), last])
    assert (found.timeline, found.spec.cycles) == (BEATS, 4)
    assert (found.finish, found.tokens) == ("length", 2)


# ---- notes


def test_a_steady_machine_needs_no_note() -> None:
    found = runs(report(100.0), report(101.0), report(100.5))
    assert profile(SUBJECT, 0, found).warnings == ()


def test_what_a_reader_should_know_is_said() -> None:
    found = runs(report(100.0), report(140.0, finish="length"), answers=((1,), (2,)))
    power, notes = Power(failed="it was unplugged"), ["power mode: 120W"]
    told = profile(SUBJECT, 0, found, power=power, notes=notes).warnings
    varies, differ, cut, failed, mode = told
    assert "a cycle varies by 23.57%" in varies
    assert "different answers" in differ
    assert "decode.max_tokens" in cut
    assert failed.endswith("not of all answers: it was unplugged")
    assert mode == "power mode: 120W"


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
    ("end", "told"),
    [(10.24, ""), (10.26, "2.6% longer"), (9.76, ""), (9.74, "2.6% less")],
)
def test_a_cycle_that_changes_in_a_soak_is_noted(end: float, told: str) -> None:
    found, when = long(10.0, 5.0, 20.0, end)
    soak = stretches(found, when, power)
    notes = [n for n in profile(SUBJECT, 0, found, soak=soak).warnings if "soak" in n]
    assert [told in note for note in notes] == ([True] if told else [])
    assert profile(SUBJECT, 0, found, soak=soak).soak == tuple(soak)


@pytest.mark.parametrize("sensors", [True, False])
def test_a_soak_is_kept_as_json_with_and_without_sensors(sensors: bool) -> None:
    found, when = long(1.0, 2.0, 3.0)
    soak = stretches(found, when, power if sensors else lambda _: Power())
    made = profile(SUBJECT, 0, found, soak=soak)
    table = json.loads(json.dumps(strict_records.encode(made)))
    assert strict_records.decode(Profile, table, "it", RequestError) == made


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
