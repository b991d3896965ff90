"""Progress reports: lines, bars or nothing, and that they stay in order when something fails."""

from __future__ import annotations

import io

import pytest

from thor_dflash.core.progress import Bars, Lines, amount, choose


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich reads these variables whether it may move the cursor, and for the width."""
    monkeypatch.setenv("TERM", "xterm")
    for name in ("COLUMNS", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_lines_come_at_most_every_two_seconds() -> None:
    clock, out = Clock(), io.StringIO()
    with Lines(out, clock).task("weights", 4000, "bytes") as task:
        for _ in range(4):
            clock.now += 1.5
            task.advance(1000)
    assert out.getvalue().splitlines() == [
        "weights 4.0 kB",
        "weights 2.0 kB of 4.0 kB, about 3 s left",
        "weights 4.0 kB of 4.0 kB",
        "weights done: 4.0 kB in 6.0 s",
    ]


def test_the_lines_of_a_long_task_become_rare() -> None:
    clock, out = Clock(), io.StringIO()
    counts = list[int]()
    with Lines(out, clock).task("layers") as task:
        for _ in range(3600):
            clock.now += 1
            task.advance(1)
            counts.append(out.getvalue().count("\n"))
    assert counts[19] == 11
    assert 60 < counts[-1] < 200
    assert counts[-1] > counts[-32], "one in half a minute"


def test_a_short_task_is_one_line_and_a_task_without_units_has_no_number() -> None:
    clock, out = Clock(), io.StringIO()
    lines = Lines(out, clock)
    with lines.task("short", 3, "files") as task:
        task.advance(3)
    with lines.task("long"):
        clock.now += 2.5
    assert out.getvalue().splitlines() == ["short 3 files", "long", "long done in 2.5 s"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_bars_give_the_cursor_back(error: type[BaseException] | None) -> None:
    out = Terminal()
    bars = Bars(out)
    try:
        with bars.task("outer", 10, "tokens") as task, bars.task("[inner]") as inner:
            task.advance(5)
            inner.advance(1)
            if error:
                raise error
    except KeyboardInterrupt:
        bars.close()
    bars.close()
    text = out.getvalue()
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h")
    assert "\x1b[?25h" in text
    with bars.task("again", 1):
        pass
    assert out.getvalue().endswith("\x1b[?25h") or out.getvalue().count("\x1b[?25h") > 1


def test_the_kind_of_report_is_chosen_by_the_stream() -> None:
    assert isinstance(choose(Terminal()), Bars)
    assert isinstance(choose(io.StringIO()), Lines)


@pytest.mark.parametrize(
    ("n", "unit", "text"),
    [
        (14_500_000_000, "bytes", "14.5 GB"),
        (12345, "tokens", "12,345 tokens"),
        (1, "runs", "1 run"),
    ],
)
def test_amounts(n: int, unit: str, text: str) -> None:
    assert amount(n, unit) == text
