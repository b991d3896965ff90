"""Telemetry of one request: its times and the results of its speculation."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal

from thor_dflash.plugins.accept.record import Record
from thor_dflash.runtime.decoding.block import Block, BlockPhase, Reason

CloseKind = Literal["", "natural", "soft", "hard"]


@dataclass(frozen=True, slots=True)
class Spec:
    """Speculation of one request."""

    cycles: int
    """Verify steps."""
    drafted: int
    """Tokens drafted."""
    accepted: int
    """Drafted tokens that were committed."""
    accept_len: float
    """Committed tokens per cycle, including the target's own one."""
    accept_hist: tuple[int, ...]
    """[R] number of cycles that committed 1, 2, ... R tokens."""
    accepted_per_position: tuple[int, ...]
    """[R - 1] how often the draft at this position was committed."""
    forced: int
    """Committed tokens that a grammar or a budget forced."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Times of one request, ms."""

    prefill_ms: float
    ttft_ms: float
    """Time to the first committed token."""
    decode_ms: float
    """From the end of the prefill to the end of the request."""
    e2e_ms: float
    tok_s: float
    """Committed tokens per second of decoding."""
    phases_ms: Mapping[str, float]
    """Time inside each graph; `host` is the rest of e2e_ms. Empty if it could not be asked for."""


@dataclass(frozen=True, slots=True)
class PhaseTotals:
    """Totals over the blocks of one request that began in one phase."""

    cycles: int = 0
    committed: int = 0
    """Tokens."""
    drafted: int = 0
    accepted: int = 0
    """Drafts committed."""
    relaxed: int = 0
    """Committed drafts that strict acceptance would have refused."""
    ms: float = 0.0

    def plus(self, other: PhaseTotals) -> PhaseTotals:
        """The sum of both."""
        return PhaseTotals(
            self.cycles + other.cycles,
            self.committed + other.committed,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
            self.relaxed + other.relaxed,
            self.ms + other.ms,
        )


@dataclass(frozen=True, slots=True)
class BlockNote:
    """Why some consecutive blocks were capped, forced, soft, gated or relaxed."""

    what: str
    why: str
    cycle: int
    """Index of the first of them, from 0."""
    cycles: int = 1
    """Number of them."""


@dataclass(frozen=True, slots=True)
class RequestReport:
    """Telemetry of one request."""

    finish: str
    completion_tokens: int
    """Tokens committed after the prompt, a stop token included."""
    cached_tokens: int
    """Prompt tokens that came from a prefix and were not read again."""
    spec: Spec
    timings: Timings
    phases: Mapping[BlockPhase, PhaseTotals]
    """The phases that the answer went through."""
    close: CloseKind
    """How its thinking ended; empty if it did not."""
    notes: tuple[BlockNote, ...]
    """Ordered by first cycle. Blocks without a note were full width, drafted and exact."""


@dataclass(slots=True)
class RequestMeter:
    """Collects telemetry while a request runs."""

    block: int
    busy: Mapping[str, float]
    """Engine seconds by graph when the request started."""
    cached: int = 0
    """Prompt tokens that came from the prefix."""
    start: float = field(default_factory=time.perf_counter)
    prefilled: float = 0.0
    first: float = 0.0
    last: float = 0.0
    """When the last block was committed, or the prefill ended."""
    cycles: int = 0
    drafted: int = 0
    forced: int = 0
    hist: list[int] = field(default_factory=list[int])
    by_position: list[int] = field(default_factory=list[int])
    parts: dict[BlockPhase, PhaseTotals] = field(default_factory=dict[BlockPhase, PhaseTotals])
    close: CloseKind = ""
    notes: dict[Reason, list[BlockNote]] = field(default_factory=dict[Reason, list[BlockNote]])

    def __post_init__(self) -> None:
        self.hist = [0] * self.block
        self.by_position = [0] * (self.block - 1)

    def prompt_done(self) -> None:
        """Note that the prefill has ended."""
        self.prefilled = self.last = time.perf_counter()

    def cycle(self, block: Block, record: Record, count: int, drafted: int) -> None:
        """Count a committed block, `drafted` rows of which held a draft or a forced id instead."""
        now = time.perf_counter()
        forced = [token >= 0 for token in block.forced]
        free = [not f for f in forced] + [True] * (self.block - len(forced))
        drafts, accepted = sum(free[:drafted]), 0
        for i in range(min(record.agreed, count, drafted)):
            self.by_position[i] += free[i]
            accepted += free[i]
        for reason in block.reasons:
            if reason.what != "soft" or record.softened:
                self._note(reason)
        part = PhaseTotals(1, count, drafts, accepted, record.relaxed, 1e3 * (now - self.last))
        self.parts[block.phase] = self.parts.get(block.phase, PhaseTotals()).plus(part)
        self.first, self.last = self.first or now, now
        self.hist[count - 1] += 1
        self.drafted += drafts
        self.forced += sum(forced[:count])
        self.cycles += 1

    def closed(self, block: Block, record: Record) -> None:
        """Note that thinking ended in this block."""
        natural: CloseKind = "soft" if record.softened else "natural"
        self.close = "hard" if block.phase == "closing" else natural

    def _note(self, reason: Reason) -> None:
        notes = self.notes.setdefault(reason, [])
        if notes and notes[-1].cycle + notes[-1].cycles == self.cycles:
            notes[-1] = replace(notes[-1], cycles=notes[-1].cycles + 1)
        else:
            notes.append(BlockNote(reason.what, reason.why, self.cycles))

    def report(
        self, finish: str, completion: int, busy: Mapping[str, float] | None
    ) -> RequestReport:
        """Return the totals. `busy`: as the field, now; None if it could not be asked for."""
        now = time.perf_counter()
        prefilled = self.prefilled or now
        decode = max(now - prefilled, 1e-9)
        phases: dict[str, float] = {}
        if busy is not None:
            phases = {name: 1e3 * (busy[name] - self.busy.get(name, 0.0)) for name in busy}
            # Up to now, like `busy`: the last step may have committed nothing.
            phases["host"] = 1e3 * (now - self.start) - sum(phases.values())
        return RequestReport(
            finish,
            completion,
            self.cached,
            Spec(
                self.cycles,
                self.drafted,
                sum(self.by_position),
                completion / self.cycles if self.cycles else 0.0,
                tuple(self.hist),
                tuple(self.by_position),
                self.forced,
            ),
            Timings(
                1e3 * (prefilled - self.start),
                1e3 * (self.first - self.start) if self.first else 0.0,
                1e3 * (now - prefilled),
                1e3 * (now - self.start),
                completion / decode,
                {name: ms for name, ms in phases.items() if ms},
            ),
            self.parts,
            self.close,
            tuple(sorted(chain(*self.notes.values()), key=lambda note: note.cycle)),
        )
