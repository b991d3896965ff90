"""What one request took and what its speculation was worth."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from thor_dflash.plugins.accept.reference import Record
from thor_dflash.runtime.block import Block


@dataclass(frozen=True, slots=True)
class Spec:
    """Speculation of one request."""

    cycles: int
    """Verify steps."""
    drafted: int
    """Tokens the drafter offered."""
    accepted: int
    """Of those, committed."""
    accept_len: float
    """Committed tokens a cycle, the target's own one included."""
    accept_hist: tuple[int, ...]
    """[R] cycles that committed 1, 2, ... R tokens."""
    accepted_per_position: tuple[int, ...]
    """[R - 1] times the draft at this position was committed."""
    forced: int
    """Committed tokens that a grammar or a budget left no choice about."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Times of one request, ms."""

    prefill_ms: float
    ttft_ms: float
    """Until the first committed token."""
    decode_ms: float
    """From the end of the prefill to the end."""
    e2e_ms: float
    tok_s: float
    """Committed tokens a second of decoding."""
    phases_ms: Mapping[str, float]
    """Time inside each graph; `host` is the rest of e2e."""


@dataclass(frozen=True, slots=True)
class Report:
    """Telemetry of one request."""

    finish: str
    completion_tokens: int
    """Committed after the prompt, a stop token included."""
    cached_tokens: int
    """Prompt tokens that came with a prefix and were not read again."""
    spec: Spec
    timings: Timings


@dataclass(slots=True)
class Meter:
    """Counts while a request runs."""

    block: int
    busy: Mapping[str, float]
    """Engine seconds by graph at the start."""
    cached: int = 0
    """Prompt tokens of the prefix."""
    start: float = field(default_factory=time.perf_counter)
    prefilled: float = 0.0
    first: float = 0.0
    end: float = 0.0
    cycles: int = 0
    drafted: int = 0
    forced: int = 0
    hist: list[int] = field(default_factory=list[int])
    by_position: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        self.hist = [0] * self.block
        self.by_position = [0] * (self.block - 1)

    def prompt_done(self) -> None:
        """The prompt is in the state."""
        self.prefilled = time.perf_counter()

    def cycle(self, block: Block, record: Record, count: int, drafts: bool) -> None:
        """A block was committed; what followed a forced row was not the drafter's."""
        forced = [token >= 0 for token in block.forced]
        free = [not f for f in forced] + [True] * (self.block - len(forced))
        self.forced += sum(forced[:count])
        self.end = time.perf_counter()
        self.first = self.first or self.end
        self.cycles += 1
        self.hist[count - 1] += 1
        if not drafts or not block.draft:
            return
        self.drafted += sum(free[: self.block - 1])
        for i in range(min(record.agreed, count)):
            self.by_position[i] += free[i]

    def report(self, finish: str, completion: int, busy: Mapping[str, float]) -> Report:
        """The sums."""
        now = time.perf_counter()
        prefilled, end = self.prefilled or now, self.end or now
        decode = max(end - prefilled, 1e-9)
        committed = sum((i + 1) * n for i, n in enumerate(self.hist))
        phases = {name: 1e3 * (busy[name] - self.busy.get(name, 0.0)) for name in busy}
        phases["host"] = 1e3 * (end - self.start) - sum(phases.values())
        return Report(
            finish,
            completion,
            self.cached,
            Spec(
                self.cycles,
                self.drafted,
                sum(self.by_position),
                committed / self.cycles if self.cycles else 0.0,
                tuple(self.hist),
                tuple(self.by_position),
                self.forced,
            ),
            Timings(
                1e3 * (prefilled - self.start),
                1e3 * (self.first - self.start) if self.first else 0.0,
                1e3 * (end - prefilled),
                1e3 * (end - self.start),
                committed / decode,
                {name: ms for name, ms in phases.items() if ms},
            ),
        )
