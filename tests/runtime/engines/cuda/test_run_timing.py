"""The times of runs, whatever is interrupted: CUDA refuses to tell one that is not over."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from thor_dflash.runtime.engines.cuda.graph_capture import CapturedGraph
from thor_dflash.runtime.engines.cuda.run_timing import RunTimes


class EventDevice:
    """Knows which events it has yet to come to, and interrupts the host after a number of calls."""

    stream = "stream"

    def __init__(self, calls: int) -> None:
        self.left = calls
        self.made = 0
        self.ahead: list[int] = []

    def __call__(self, name: str, *arguments: Any) -> Any:
        found = 1.0
        if name == "cuEventCreate":
            found = self.made = self.made + 1
        elif name == "cuEventRecord":
            self.ahead.append(arguments[0])
        elif name == "cuEventElapsedTime":
            assert not {*arguments} & {*self.ahead}, "this run is not over"
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return found

    make = __call__


@pytest.mark.parametrize("calls", range(1, 32))
def test_after_an_interrupt_only_times_that_are_over_are_asked_for(
    calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, runs, ended = EventDevice(calls), RunTimes(), CapturedGraph.ended
    one = CapturedGraph("one", device, lambda: None)  # type: ignore[arg-type]

    def noted(captured: CapturedGraph, count: int) -> None:
        ended(captured, count)
        device("an interrupt may come here too")

    monkeypatch.setattr(CapturedGraph, "ended", noted)
    for _ in range(9):
        device.ahead.clear()
        with suppress(KeyboardInterrupt):
            runs.run(one)
            runs.run(one)
            runs.collect()
            del device.ahead[:-2]  # the last run still goes on
            runs.idle_before()
            runs.collect()
    assert device.left < 0
    assert runs.seconds["one"] > 0


def test_a_finaliser_may_ask_for_times_while_runs_are_noted_as_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The finaliser of an abandoned request runs wherever Python collects garbage."""
    runs, ended = RunTimes(), CapturedGraph.ended
    one = CapturedGraph("one", EventDevice(0), lambda: None)  # type: ignore[arg-type]

    def finalised(captured: CapturedGraph, count: int) -> None:
        ended(captured, count)
        runs.idle()  # as `busy` does

    monkeypatch.setattr(CapturedGraph, "ended", finalised)
    for _ in range(3):
        runs.run(one)
    runs.idle()
    one.driver.ahead.clear()  # type: ignore[attr-defined]
    runs.collect()
    assert runs.seconds == {"one": pytest.approx(3e-3)}
