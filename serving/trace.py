"""The steps of one slow plan as a trace that ui.perfetto.dev and Chrome show."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import msgspec

from thor_dflash.errors import ConfigError
from thor_dflash.serving import wire

KEPT = 32
"""Traces in the directory; older ones make room."""
ENDING = ".trace.json"


@dataclass(slots=True)
class Trace:
    """Marks of one plan. All times monotonic, s."""

    arrived: float
    _marks: list[tuple[str, float, float]] = field(default_factory=list[tuple[str, float, float]])
    _last: float = 0.0

    def begin(self) -> None:
        """The queue is behind it."""
        self._mark("queued", self.arrived)

    def stepped(self, phase: wire.Phase) -> None:
        """A step ended, and began where the one before it did."""
        self._mark(phase, self._last)

    def _mark(self, name: str, since: float) -> None:
        self._last = time.monotonic()
        self._marks.append((name, since, self._last))

    def took_ms(self) -> float:
        """From its arrival to its last step."""
        return 1e3 * (self._last - self.arrived)

    def events(self, result: wire.Result | None) -> dict[str, Any]:
        """The trace: one row of steps, and what came of them."""
        steps = [
            {"ph": "X", "name": name, "pid": 1, "tid": "engine",
             "ts": 1e6 * (since - self.arrived), "dur": 1e6 * (until - since)}
            for name, since, until in self._marks
        ]  # fmt: skip
        told = None if result is None else (result.usage, result.timings, result.spec)
        return {"traceEvents": steps, "displayTimeUnit": "ms", "otherData": {"result": told}}


def check_directory(directory: Path) -> None:
    """Make the directory. Refuse one that takes no files: the first slow plan would be late news.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=directory):
            pass
    except OSError as e:
        raise ConfigError(
            f"serve.trace_dir must be a directory that can be written "
            f"(got {directory}: {e.strerror})"
        ) from e


def write(directory: Path, id: str, trace: dict[str, Any]) -> Path:
    """Let go of the oldest traces, to write one more.

    Raises:
        OSError: the directory cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    kept = sorted((path for path in directory.glob(f"*{ENDING}") if _number(path)), key=_number)
    # First, so that a disk that is full of them has room.
    for old in kept[: 1 - KEPT]:
        old.unlink(missing_ok=True)
    # The newest whatever the clock says: a machine may have lost its time.
    number = max(time.time_ns(), 1 + max(map(_number, kept), default=0))
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", id)
    path = directory / f"{number}-{name}{ENDING}"
    try:
        path.write_bytes(msgspec.json.encode(trace))
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return path


def _number(path: Path) -> int:
    """By which traces are in order, ns since 1970; 0 of a file that is none of ours."""
    found = re.match("([0-9]+)-", path.name)
    return int(found[1]) if found else 0
