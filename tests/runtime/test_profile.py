"""What many runs of a request are made into: spreads, phases, what may be compared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from thor_dflash.runtime.profile import Subject, profile, spread
from thor_dflash.runtime.telemetry import Report, Spec, Timings

SUBJECT = Subject("1", "p" * 64, "ort", "CPU", "q" * 64, 5, {"decode.gate": "off"})


def report(e2e: float, cycles: int = 4, finish: str = "stop", **phases: float) -> Report:
    spec = Spec(cycles, 60, 6, 2.5, (2, 1, 1), (3, 2), 0)
    host = e2e - sum(phases.values())
    timings = Timings(e2e / 4, e2e / 2, 3 * e2e / 4, e2e, 50.0, {**phases, "host": host})
    return Report(finish, 10, 0, spec, timings, {}, "", ())


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


def test_variation_is_deviation_over_mean() -> None:
    assert spread([9.0, 11.0]).variation == pytest.approx(2**0.5 / 10)
    assert spread([3.0]).variation == 0
    assert spread([0.0, 0.0]).variation == 0


# ---- phases


def test_shares_add_up_and_what_reads_the_prompt_has_no_cycle() -> None:
    runs = [
        report(100.0, verify=60.0, prefill=20.0, observe_chunk=4.0),
        report(200.0, verify=120.0, prefill=40.0, **{"prefill.chunk128": 8.0}),
    ]
    phases = profile(SUBJECT, 0, runs, [(1,), (1,)]).phases
    assert list(phases) == ["prefill", "observe_chunk", "prefill.chunk128", "verify", "host"]
    assert sum(phase.share for phase in phases.values()) == pytest.approx(1)
    assert phases["verify"].share == pytest.approx(0.6)
    assert (phases["verify"].ms, phases["verify"].cycle_ms) == (90.0, 22.5)
    for name in ("prefill", "observe_chunk", "prefill.chunk128", "host"):
        assert phases[name].cycle_ms == 0


def test_the_numbers_of_an_answer() -> None:
    times = profile(SUBJECT, 3, [report(100.0, cycles=5)], [(1, 2)]).times
    assert {name: s.median for name, s in times.items()} == {
        "ttft_ms": 50.0,
        "prefill_ms": 25.0,
        "cycle_ms": 15.0,
        "e2e_ms": 100.0,
        "tok_s": 50.0,
    }


# ---- notes


def test_a_steady_machine_needs_no_note() -> None:
    runs = [report(100.0), report(101.0), report(100.5)]
    assert profile(SUBJECT, 0, runs, [(1,)] * 3).warnings == ()


def test_what_a_reader_should_know_is_said() -> None:
    runs = [report(100.0), report(140.0, finish="length")]
    varies, differ, cut = profile(SUBJECT, 0, runs, [(1,), (2,)]).warnings
    assert "a cycle varies by 23.6%" in varies
    assert "different answers" in differ
    assert "decode.max_tokens" in cut


# ---- comparing


def test_versions_may_differ_and_nothing_else() -> None:
    assert SUBJECT.differs(replace(SUBJECT, version="2")) == []
    other = Subject("1", "r" * 64, "cuda", "GPU", "s" * 64, 6, {"decode.gate": "on", "x": "1"})
    assert SUBJECT.differs(other) == [
        "package rrrrrrrrrrrr, not pppppppppppp",
        "engine cuda, not ort",
        "device GPU, not CPU",
        "prompt ssssssssssss, not qqqqqqqqqqqq",
        "decode.gate on, not off",
        "x 1, not nothing",
    ]
