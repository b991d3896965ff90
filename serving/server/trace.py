"""The steps of one slow plan as a trace file for ui.perfetto.dev and Chrome."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from thor_dflash.serving.protocol import messages

MAX_TRACES = 32
"""Most traces in the directory; the oldest are deleted."""
SUFFIX = ".trace.json"


@dataclass(slots=True)
class StepTrace:
    """The steps of one plan. All times monotonic, s."""

    arrived: float
    _marks: list[tuple[str, float, float]] = field(default_factory=list[tuple[str, float, float]])
    _last: float = 0.0

    def begin(self) -> None:
        """Mark the end of the wait in the queue."""
        self._mark("queued", self.arrived)

    def stepped(self, phase: messages.Phase) -> None:
        """Mark the end of a step, which began where the previous one ended."""
        self._mark(phase, self._last)

    def _mark(self, name: str, since: float) -> None:
        self._last = time.monotonic()
        self._marks.append((name, since, self._last))

    def took_ms(self) -> float:
        """Return the time from the plan's arrival to the end of its last step, ms."""
        return 1e3 * (self._last - self.arrived)

    def events(self, result: messages.Result | None) -> dict[str, Any]:
        """Return the trace: one row of steps, and the usage, timings and spec of the result."""
        steps = [
            {"ph": "X", "name": name, "pid": 1, "tid": "engine",
             "ts": 1e6 * (since - self.arrived), "dur": 1e6 * (until - since)}
            for name, since, until in self._marks
        ]  # fmt: skip
        summary = None if result is None else (result.usage, result.timings, result.spec)
        return {"traceEvents": steps, "displayTimeUnit": "ms", "otherData": {"result": summary}}


def write(directory: Path, id: str, trace: dict[str, Any]) -> Path:
    """Write a trace and delete the oldest ones. Returns its path.

    Raises:
        OSError: the directory cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    kept = sorted(directory.glob(f"[0-9]*-*{SUFFIX}"))
    # Delete before writing, so that a disk full of traces has space again.
    for old in kept[: 1 - MAX_TRACES]:
        old.unlink(missing_ok=True)
    path = directory / f"{time.time_ns()}-{re.sub(r'[^A-Za-z0-9_.-]', '_', id)}{SUFFIX}"
    path.write_bytes(msgspec.json.encode(trace))
    return path
