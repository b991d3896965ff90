"""What a meter makes of blocks and of time: the counts and the clock are the tests' own."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest

from thor_dflash.runtime.telemetry import Meter


@dataclass
class Clock:
    """Stands still until it is told to go on."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    it = Clock()
    monkeypatch.setattr(time, "perf_counter", it)
    return it


def test_a_last_step_that_commits_nothing_has_its_time(clock: Clock) -> None:
    meter = Meter(16, {"prefill": 3.0, "verify": 7.0}, start=clock())
    clock.now += 2
    meter.prompt_done()
    clock.now += 5  # a verify, and then a dead end
    report = meter.report("grammar_dead_end", 0, {"prefill": 4.5, "verify": 11.0})
    assert report.timings.phases_ms == {"prefill": 1500, "verify": 4000, "host": 1500}
    assert (report.timings.decode_ms, report.timings.e2e_ms) == (5000, 7000)
