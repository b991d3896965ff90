"""Progress reports: lines, bars or nothing, and that they stay in order when something fails."""

from __future__ import annotations

import io

import pytest

from thor_dflash.cli import main
from thor_dflash.core import progress
from thor_dflash.core.progress import Bars, Lines, Silent, amount, choose


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
        "weights 2.0 kB of 4.0 kB",
        "weights 4.0 kB of 4.0 kB",
        "weights done: 4.0 kB in 6.0 s",
    ]


def test_a_short_task_is_one_line_and_a_task_without_units_has_no_number() -> None:
    clock, out = Clock(), io.StringIO()
    lines = Lines(out, clock)
    with lines.task("short", 3, "files") as task:
        task.advance(3)
    with lines.task("long"):
        clock.now += 2.5
    assert out.getvalue().splitlines() == ["short 3 files", "long", "long done in 2.5 s"]


def test_a_task_that_fails_is_not_done() -> None:
    out = io.StringIO()
    with pytest.raises(KeyboardInterrupt), Lines(out).task("rows") as task:
        task.advance(1)
        raise KeyboardInterrupt
    assert out.getvalue() == "rows\n"


def test_what_cannot_be_written_ends_no_work() -> None:
    class Gone(io.StringIO):
        def write(self, text: str, /) -> int:
            raise OSError(5, "Input/output error")

        def flush(self) -> None:
            raise OSError(5, "Input/output error")

    report = Lines(Gone())
    with report.task("rows", 2) as task:
        task.advance(1)
    report.close()


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


def test_a_task_that_ends_inside_another_leaves_its_bar() -> None:
    out = Terminal()
    bars = Bars(out)
    with bars.task("outer [red]", 10, "tokens") as outer:
        with bars.task("inner", 10):
            pass
        outer.advance(5)
        (shown,) = bars._bars.tasks
        assert (shown.completed, shown.fields["note"]) == (5, "5 of 10 tokens")
        assert "\x1b[?25h" not in out.getvalue(), "the cursor comes back when nothing is shown"
    assert "\x1b[?25h" in out.getvalue()
    assert "outer [red]" in out.getvalue()


def test_the_kind_of_report_is_chosen_by_the_stream() -> None:
    assert isinstance(choose(Terminal()), Bars)
    assert isinstance(choose(io.StringIO()), Lines)
    assert isinstance(choose(io.StringIO(), quiet=True), Silent)


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_a_command_ends_its_report_and_makes_none_beside_json(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []

    class Seen(Silent):
        def close(self) -> None:
            seen.append("closed")

    def choose(stream: object, *, quiet: bool) -> Silent:
        seen.append(quiet)
        return Seen()

    monkeypatch.setattr(progress, "choose", choose)
    monkeypatch.setattr(main, "_run_command", lambda *a: 1 // 0)  # a bug, far from any clean-up
    with pytest.raises(ZeroDivisionError):
        main.main(["doctor", *words])
    assert seen == [bool(words), "closed"]


@pytest.mark.parametrize(
    ("n", "unit", "text"),
    [
        (999, "bytes", "999 B"),
        (1000, "bytes", "1.0 kB"),
        (14_500_000_000, "bytes", "14.5 GB"),
        (12345, "tokens", "12,345 tokens"),
        (1, "runs", "1 run"),
        (1, "s", "1 s"),
    ],
)
def test_amounts(n: int, unit: str, text: str) -> None:
    assert amount(n, unit) == text
