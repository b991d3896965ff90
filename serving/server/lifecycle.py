"""The state of a server, from loading to its end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from thor_dflash.core.errors import PlanError, ThorError
from thor_dflash.serving.planner.backend import Backend
from thor_dflash.serving.protocol import messages
from thor_dflash.serving.server.heartbeat import Heartbeat

LEVELS = {
    "ready": "OK", "busy": "OK", "loading": "WARN", "warming": "WARN", "draining": "WARN",
    "degraded": "ERROR", "failed": "ERROR",
}  # fmt: skip
"""ROS diagnostics level of each state."""
FAILED = "the server met a fault and ends; its log says more"
"""The text for clients; see workers.FAULT."""
RETRY_MS = 500.0
"""When a client should retry if nothing better is known."""
DEGRADED = 0.2
"""Fraction of the watchdog's time after which a step makes the state `degraded`, well before it is
fatal."""


@dataclass(slots=True)
class Lifecycle:
    """The state. Owned by the I/O thread."""

    watchdog_s: float
    backend: Backend | None = None
    """None until it is ready."""
    warming: bool = False
    failed: ThorError | None = None
    draining: bool = False
    stopping: bool = False
    """The server ends once the last answer is sent."""
    stop_by: float | None = None
    """When the server ends in any case, monotonic, s."""
    last_error: str | None = None
    started: float = field(default_factory=time.monotonic)
    ready_after_s: float | None = None
    heartbeat: Heartbeat = field(default_factory=Heartbeat)

    def state(self, busy: bool) -> messages.State:
        """Return the state as one word."""
        if self.failed is not None:
            return "failed"
        if self.backend is None:
            return "warming" if self.warming else "loading"
        if self.heartbeat.age(time.monotonic()) > DEGRADED * self.watchdog_s:
            return "degraded"
        if self.draining:
            return "draining"
        return "busy" if busy else "ready"

    def ready(self) -> bool:
        """Whether plans are accepted."""
        return self.backend is not None and not self.draining and self.failed is None

    def loaded(self) -> Backend:
        """Return the backend for reading; the server may be draining.

        Raises:
            PlanError: the server has failed, or is not ready yet.
        """
        if self.failed is not None:
            raise PlanError("engine_fault", FAILED)
        if self.backend is None:
            text = "the server must be ready (got one that is warming up)"
            raise PlanError("not_ready", text, retry_after_ms=RETRY_MS)
        return self.backend

    def open(self) -> Backend:
        """Return the backend for operations that start work or change something.

        Raises:
            PlanError: as `loaded`, or the server is draining.
        """
        backend = self.loaded()
        if self.draining:
            raise PlanError("draining", "the server is about to stop and takes no more work")
        return backend

    def health(self, running: int, waiting: int) -> dict[str, Any]:
        """Return the answer to `health`."""
        state = self.state(running > 0)
        now = time.monotonic()
        return {
            "state": state,
            "ready": self.ready(),
            "level": LEVELS[state],
            "error": FAILED if self.failed else self.last_error,
            "watchdog_age_s": self.heartbeat.age(now),
            "uptime_s": now - self.started,
            "ready_after_s": self.ready_after_s,
            "running": running,
            "waiting": waiting,
        }
