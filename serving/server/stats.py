"""Statistics of a server: plans by finish reason, latencies, speculation."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from thor_dflash.core.errors import PlanError
from thor_dflash.serving.protocol import messages

WINDOW = 256
"""Newest plans that the percentiles are computed over."""
MAX_LISTED = 16
"""Newest plans that are listed one by one."""
LATENCIES = ("queue_ms", "ttft_ms", "ttfa_ms", "e2e_ms")


@dataclass(slots=True)
class Stats:
    """Counts since the start of the server."""

    requests: Counter[str] = field(default_factory=Counter[str])
    """Requests by operation."""
    finished: Counter[str] = field(default_factory=Counter[str])
    """Plans by finish reason."""
    refused: Counter[str] = field(default_factory=Counter[str])
    """Error answers by code."""
    tokens: Counter[str] = field(default_factory=Counter[str])
    """Tokens by kind, as in `Usage`."""
    spec: Counter[str] = field(default_factory=Counter[str])
    per_position: Counter[int] = field(default_factory=Counter[int])
    _last: deque[dict[str, Any]] = field(
        default_factory=lambda: deque[dict[str, Any]](maxlen=WINDOW)
    )

    def result(self, result: messages.Result) -> None:
        """Record an answered plan."""
        self.finished[result.finish_reason] += 1
        for kind in ("prompt", "cached", "thinking", "output"):
            self.tokens[kind] += getattr(result.usage, f"{kind}_tokens")
        if (spec := result.spec) is not None:
            for name in ("cycles", "drafted", "accepted", "forced"):
                self.spec[name] += getattr(spec, name)
            self.per_position.update(dict(enumerate(spec.accepted_per_position)))
        if (times := result.timings) is not None:
            listed = {name: getattr(times, name) for name in (*LATENCIES, "tok_s")}
            self._last.append({"finish_reason": result.finish_reason, **listed})

    def error(self, error: PlanError) -> None:
        """Record an error answer."""
        self.refused[error.code] += 1

    def show(self) -> dict[str, Any]:
        """Return all statistics as plain values."""
        positions = range(max(self.per_position, default=-1) + 1)
        return {
            "requests": dict(self.requests),
            "finished": dict(self.finished),
            "refused": dict(self.refused),
            "tokens": dict(self.tokens),
            "spec": {
                **self.spec,
                "accepted_per_position": [self.per_position[i] for i in positions],
            },
            "percentiles": {
                name: _percentiles([p[name] for p in self._last if p[name] is not None])
                for name in LATENCIES
            },
            "last": list(self._last)[-MAX_LISTED:],
        }


def _percentiles(values: list[float]) -> dict[str, float] | None:
    """Return p50, p90 and p99 by sorted index, without interpolation; None for no values."""
    if not values:
        return None
    ranked = sorted(values)
    return {f"p{p}": ranked[min(len(ranked) - 1, len(ranked) * p // 100)] for p in (50, 90, 99)}
