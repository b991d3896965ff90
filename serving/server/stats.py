"""Statistics of a server: plans by finish reason, latencies, speculation."""

from __future__ import annotations

import bisect
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from thor_dflash.core.errors import Code, PlanError
from thor_dflash.core.results import DraftCounts, DraftSource, Timings
from thor_dflash.serving.protocol import messages

WINDOW = 256
"""Newest plans that the percentiles are computed over."""
MAX_LISTED = 16
"""Newest plans that are listed one by one."""
LATENCIES = ("queue_ms", "ttft_ms", "ttfa_ms", "e2e_ms")
BOUNDS_MS = (
    1, 2, 5, 10, 20, 50, 100, 200, 300, 500, 750, 1000, 1500, 2000, 3000, 5000, 7500, 10_000,
    15_000, 20_000, 30_000, 60_000, 120_000, 300_000, 1_800_000,
)  # fmt: skip
"""Upper bounds of the buckets of a histogram, ms; the last bucket has none. A plan of the 27B takes
10 to 20 s, a wait in the queue anything from nothing to a minute."""
DRAFTING = ("cycles", "drafted", "accepted")
IMAGES = ("plans", "images", "cached", "tokens", *DRAFTING)
"""Counts of plans that showed images."""
LATE: Mapping[Code, str] = {"deadline": "missed", "deadline_infeasible": "refused"}
"""Error code -> how a plan that ended with it fared with its deadline; other codes say nothing."""


@dataclass(slots=True)
class Histogram:
    """Times since the start, by bucket."""

    buckets: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_MS) + 1))
    """Times in each bucket, not summed over the smaller ones."""
    sum_ms: float = 0.0

    def add(self, ms: float) -> None:
        """Record a time; a bound belongs to the bucket below it."""
        self.buckets[bisect.bisect_left(BOUNDS_MS, ms)] += 1
        self.sum_ms += ms


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
    sources: dict[DraftSource, DraftCounts] = field(default_factory=dict[DraftSource, DraftCounts])
    """Drafts by where they came from."""
    images: Counter[str] = field(default_factory=Counter[str])
    """Plans that showed images, these images, and how the drafts of such plans fared."""
    per_position: Counter[int] = field(default_factory=Counter[int])
    deadlines: Counter[str] = field(default_factory=Counter[str])
    """Plans with a deadline: met, missed or refused as infeasible."""
    joules: Counter[str] = field(default_factory=Counter[str])
    """Energy of the plans by power rail."""
    tower_ms: float = 0.0
    """Time of the vision tower."""
    measured_s: float = 0.0
    """Time over which the energy was measured, s: of all runs if there are sensors."""
    histograms: dict[str, Histogram] = field(
        default_factory=lambda: {name: Histogram() for name in LATENCIES}
    )
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
            for source, counts in spec.sources.items():
                self.sources[source] = self.sources.get(source, DraftCounts()).plus(counts)
            self.per_position.update(dict(enumerate(spec.accepted_per_position)))
        if result.images:
            self._images(result, result.images)
        if result.timings is not None:
            self._times(result, result.timings)

    def _images(self, result: messages.Result, images: tuple[messages.ImageResult, ...]) -> None:
        self.images.update(plans=1, images=len(images))
        for image in images:
            self.images["cached"] += image.cached
            self.images["tokens"] += image.tokens
            self.tower_ms += image.encode_ms
        for name in DRAFTING if result.spec else ():
            self.images[name] += getattr(result.spec, name)

    def _times(self, result: messages.Result, times: Timings) -> None:
        listed = {name: getattr(times, name) for name in LATENCIES}
        for name, ms in listed.items():
            if ms is not None:
                self.histograms[name].add(ms)
        watts = None
        if times.energy_j:
            seconds = 1e-3 * (times.e2e_ms - times.queue_ms)
            self.joules.update(times.energy_j)
            self.measured_s += seconds
            watts = {rail: joules / seconds for rail, joules in times.energy_j.items()}
        accept_len = result.spec.accept_len if result.spec else None
        self._last.append(
            {
                "finish_reason": result.finish_reason,
                **listed,
                "tok_s": times.tok_s,
                "accept_len": accept_len,
                "watts": watts,
            }
        )

    def deadline(self, outcome: messages.Result | PlanError, *, late: bool) -> None:
        """Record how a plan that had a deadline ended; `late`: after it."""
        if isinstance(outcome, messages.Result):
            late = late or outcome.finish_reason == "deadline"
            self.deadlines["missed" if late else "met"] += 1
        elif outcome.code in LATE:
            self.deadlines[LATE[outcome.code]] += 1

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
                "sources": {name: asdict(counts) for name, counts in self.sources.items()},
                "accepted_per_position": [self.per_position[i] for i in positions],
            },
            "percentiles": {
                name: _percentiles([p[name] for p in self._last if p[name] is not None])
                for name in LATENCIES
            },
            "last": list(self._last)[-MAX_LISTED:],
            "images": {**{name: self.images[name] for name in IMAGES}, "tower_ms": self.tower_ms},
            "deadlines": dict(self.deadlines),
            "energy": {"joules": dict(self.joules), "seconds": self.measured_s},
            "histograms": {
                "bounds_ms": BOUNDS_MS,
                **{name: asdict(times) for name, times in self.histograms.items()},
            },
        }


def _percentiles(values: list[float]) -> dict[str, float] | None:
    """Return p50, p90 and p99 by sorted index, without interpolation; None for no values."""
    if not values:
        return None
    ranked = sorted(values)
    return {f"p{p}": ranked[min(len(ranked) - 1, len(ranked) * p // 100)] for p in (50, 90, 99)}
