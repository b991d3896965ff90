"""Progress reports of long tasks: a bar on a terminal, plain lines elsewhere, or nothing.

with progress.task("hash", total_bytes, "bytes") as task:
    task.advance(n)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, Protocol, Self, TextIO

INTERVAL, LONGEST = 2.0, 30.0
"""Least time between two plain lines of one task, s, and what it grows to in a long one: a tenth of
the time so far, so that an hour's work does not fill a log."""

State = Literal["running", "done", "failed"]


class ProgressTask:
    """One task in progress: counts its units and passes every change to `show(done, state)`."""

    def __init__(self, show: Callable[[int, State], None]) -> None:
        self._show = show
        self._done = 0

    def advance(self, n: int) -> None:
        """Report that `n` more units are done."""
        self._done += n
        self._show(self._done, "running")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._show(self._done, "done" if error is None else "failed")


class Progress(Protocol):
    """Reports the progress of tasks."""

    def task(self, label: str, total: int | None = None, unit: str = "") -> ProgressTask:
        """Begin a task of `total` units; None: unknown."""
        ...

    def close(self) -> None:
        """Restore the terminal. Idempotent."""
        ...


def amount(n: int, unit: str) -> str:
    """`n` units as text; bytes in powers of 1000. A unit of two characters or more is a plural."""
    if unit != "bytes":
        one = n == 1 and len(unit) > 1
        return f"{n:,} {unit.removesuffix('s') if one else unit}".rstrip()
    size, names = float(n), ["B", "kB", "MB", "GB"]
    while size >= 1000 and len(names) > 1:
        size, names = size / 1000, names[1:]
    return f"{n} B" if names[0] == "B" else f"{size:.1f} {names[0]}"


def _part(done: int, total: int | None, unit: str) -> str:
    """How far a task is: "1 of 6 runs", "3.0 MB of 9.9 MB", "7 tokens"."""
    if not total:
        return amount(done, unit)
    return f"{amount(done, unit if unit == 'bytes' else '')} of {amount(total, unit)}"


def _left(spent: float, done: int, total: int | None) -> str:
    """How long the rest of a task will take at its rate so far: ", about 40 s left"."""
    if not total or not 0 < done < total:
        return ""
    return f", about {spent * (total - done) / done:.0f} s left"


def _pause(spent: float) -> float:
    """The time from one plain line of a task to the next, s, after it has taken `spent`."""
    return min(max(INTERVAL, 0.1 * spent), LONGEST)


class LineStream(Protocol):
    """A stream that lines are printed to."""

    def write(self, text: str, /) -> object:
        """See TextIO."""
        ...

    def flush(self) -> object:
        """See TextIO."""
        ...


def print_line(stream: LineStream, text: str) -> None:
    """Print a line if possible: a full disk or a reader that has gone must not affect the work or
    the exit status.
    """
    with suppress(OSError):
        # In one write, so that Ctrl-C cannot separate the text from its line end.
        stream.write(f"{text}\n")
        stream.flush()


class Silent:
    """Reports nothing."""

    def task(self, label: str, total: int | None = None, unit: str = "") -> ProgressTask:
        """See Progress."""
        return ProgressTask(lambda done, state: None)

    def close(self) -> None:
        """See Progress."""


class Lines:
    """Plain lines: one at the start of a task, some while it runs, one at the end of a long one."""

    def __init__(self, stream: LineStream, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock

    def task(self, label: str, total: int | None = None, unit: str = "") -> ProgressTask:
        """See Progress."""
        start = last = self._clock()
        whole = "" if total is None else f" {amount(total, unit)}"
        print_line(self._stream, f"{label}{whole}")

        def show(done: int, state: State) -> None:
            nonlocal last
            now = self._clock()
            if state == "done" and now - start >= INTERVAL:
                what = f": {amount(done, unit)}" if done else ""
                print_line(self._stream, f"{label} done{what} in {now - start:.1f} s")
            elif state == "running" and now - last >= _pause(now - start):
                last = now
                left = _left(now - start, done, total)
                print_line(self._stream, f"{label} {_part(done, total, unit)}{left}")

        return ProgressTask(show)

    def close(self) -> None:
        """See Progress."""


class Bars:
    """Bars on a terminal. They vanish when their task ends, so the scroll-back stays clean."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as RichProgress

        console = Console(file=stream)
        self._bars = RichProgress(
            SpinnerColumn("line" if console.options.ascii_only else "dots"),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[note]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            # rich would send to the terminal what is written to stdout while a bar shows, even if
            # stdout is a file. Nothing is written there before the bars have gone.
            redirect_stdout=False,
        )
        self._open = 0

    def task(self, label: str, total: int | None = None, unit: str = "") -> ProgressTask:
        """See Progress."""
        self._bars.start()
        self._open += 1
        bar = self._bars.add_task(label, total=total, note="")

        def show(done: int, state: State) -> None:
            if state == "running":
                self._bars.update(bar, completed=done, note=_part(done, total, unit))
                return
            self._bars.remove_task(bar)
            self._open -= 1
            if self._open == 0:
                self._bars.stop()

        return ProgressTask(show)

    def close(self) -> None:
        """See Progress."""
        self._bars.stop()


def choose(stream: TextIO) -> Progress:
    """Bars if `stream` is a terminal that can redraw a line, else plain lines."""
    if not stream.isatty():
        return Lines(stream)
    from rich.console import Console

    return Lines(stream) if Console(file=stream).is_dumb_terminal else Bars(stream)
