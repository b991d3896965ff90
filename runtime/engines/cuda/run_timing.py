"""Keeps track of the runs on the stream and collects their times once they have ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from thor_dflash.runtime.engines.cuda.graph_capture import CapturedGraph


@dataclass(slots=True)
class RunTimes:
    """Runs of captured steps, in order."""

    latest: CapturedGraph | None = None
    """The last run, as long as the values it handed over are current."""
    noted: list[float] | None = None
    """If set, the time of each run is also appended here, s."""
    left: bool = False
    """Whether the last run may still be going on although its handover has been read."""
    ended: list[CapturedGraph] = field(default_factory=list[CapturedGraph])
    """Runs that have ended and whose times have not been collected."""
    _running: list[CapturedGraph] = field(default_factory=list[CapturedGraph])
    _seconds: dict[str, float] = field(default_factory=dict[str, float])

    def run(self, captured: CapturedGraph) -> None:
        """Enqueue a step."""
        captured.run()
        self._running.append(captured)
        self.latest = captured

    def idle(self) -> None:
        """Note that all work of the stream is done."""
        self._end(going=0)
        self.left = False

    def idle_before(self) -> None:
        """Note that all work before the last run is done, and also that run's handover."""
        self._end(going=1)
        self.left = True

    def _end(self, going: int) -> None:
        """Note that all runs but the last `going` have ended."""
        # A finaliser may run within this loop and get here by `busy`, so count anew each time.
        while len(self._running) > going:
            # Removed first: after an interrupt here, the next call must not end a later run.
            captured = self._running.pop(0)
            captured.ended(1)
            self.ended.append(captured)

    def collect(self) -> None:
        """Collect the times of the ended runs."""
        while self.ended:
            captured = self.ended.pop(0)
            each = captured.collect()
            self._seconds[captured.name] = self._seconds.get(captured.name, 0.0) + sum(each)
            if self.noted is not None:
                self.noted += each

    @property
    def seconds(self) -> Mapping[str, float]:
        """Total collected seconds by name."""
        return dict(self._seconds)
