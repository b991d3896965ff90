"""The signs of life of the engine thread."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Heartbeat:
    """Time of the engine thread's last heartbeat. Written there, read by the watchdog."""

    busy: bool = False
    at: float = field(default_factory=time.monotonic)
    _excused: tuple[float, float] = (0.0, 0.0)
    """A heartbeat, and seconds after it that do not count. Written by the watchdog only, so that
    it cannot overwrite a newer one."""

    def beat(self, *, busy: bool) -> None:
        """Record a heartbeat: a step is about to run (`busy`), or the job has ended."""
        self.at = time.monotonic()
        self.busy = busy

    def age(self, now: float) -> float:
        """Return the seconds since the last heartbeat, 0 while the engine is idle."""
        at = self.at
        return max(0.0, now - at - self._not_counted(at)) if self.busy else 0.0

    def excuse(self, seconds: float, now: float) -> None:
        """Do not count so many of the seconds from the last heartbeat to `now`."""
        at = self.at
        # The heartbeat may have come after the pause: then no time since it is part of the pause.
        self._excused = at, min(seconds + self._not_counted(at), max(0.0, now - at))

    def _not_counted(self, at: float) -> float:
        since, seconds = self._excused
        return seconds if since == at else 0.0
