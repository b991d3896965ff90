"""Telemetry of one request: its times and the results of its speculation."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal

from thor_dflash.core.results import DraftCounts, DraftSource, Speculation, Timings, Usage, rate
from thor_dflash.plugins.accept.record import Record
from thor_dflash.runtime.decoding.block import (
    Block,
    BlockPhase,
    DecodeProgress,
    Reason,
    Sampling,
)
from thor_dflash.runtime.decoding.proposers import Proposal

CloseKind = Literal["", "natural", "soft", "hard", "call"]


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
class BlockDrafts:
    """The drafts of one block."""

    source: DraftSource
    drafted: int
    """Tokens; without forced ids."""
    accepted: int
    """Of them, those that were committed."""
    tail: BlockDrafts | None = None
    """What a text had behind the drafter's last draft; not counted above."""


def _by_source(proposal: Proposal, free: Sequence[bool], accepted: int) -> BlockDrafts:
    """`free`: of each drafted row, whether it holds a draft and no forced id. The first `accepted`
    rows were committed.
    """
    source, tail = proposal.source, proposal.tail
    own = len(free) - len(tail.ids)
    found = BlockDrafts(source, sum(free[:own]), sum(free[: min(own, accepted)]))
    if not tail.ids:
        return found
    return replace(found, tail=BlockDrafts(tail.source, sum(free[own:]), sum(free[own:accepted])))


@dataclass(frozen=True, slots=True)
class ReuseReport:
    """What one request reused."""

    boundary: Literal["", "prefix", "system", "user", "prompt"] = ""
    """What it continued from: a pinned prefix, a boundary, or nothing."""
    held: int = 0
    """Prompt tokens that were not read."""
    reread: int = 0
    """Tokens that were read although a kept earlier prompt begins with them, too."""
    diverged_at: int = 0
    """Tokens that the prompt has in common with the kept earlier prompt that is most like it."""
    why: Literal["", "off", "first", "diverged", "evicted", "too_short"] = "off"
    """Why nothing was reused: reuse is off, no conversation is kept, none begins like the prompt,
    the one that did was evicted, or the prompt has no whole chunk."""
    swap_ms: float = 0.0
    """Time that this thread spent on copies of states, ms. A GPU makes them meanwhile."""


NO_REUSE = ReuseReport()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestReport:
    """Telemetry of one request."""

    finish: str
    completion_tokens: int
    """Tokens committed after the prompt, a stop token included."""
    usage: Usage
    timings: Timings
    """Without queue_ms, grammar_ms and energy_j, which only a server knows."""
    phases_ms: Mapping[str, float]
    """Time inside each graph, ms; `host` is the rest of e2e_ms. Empty if it could not be asked for.
    """
    spec: Speculation
    phases: Mapping[BlockPhase, PhaseTotals]
    """The phases that the answer went through."""
    close: CloseKind
    """How its thinking ended; empty if it did not."""
    notes: tuple[BlockNote, ...]
    """Ordered by first cycle. Blocks without a note were full width, drafted and exact."""
    drafts: tuple[BlockDrafts, ...] = ()
    """Of every block, in order."""
    reuse: ReuseReport = NO_REUSE
    sampling: Sampling | None = None
    """How its tokens were drawn, with the seed; None: greedy."""


@dataclass(slots=True)
class RequestMeter:
    """Collects telemetry while a request runs."""

    block: int
    busy: Mapping[str, float]
    """Engine seconds by graph when the request started."""
    cached: int = 0
    """Prompt tokens that were not read."""
    reuse: ReuseReport = NO_REUSE
    sampling: Sampling | None = None
    start: float = field(default_factory=time.perf_counter)
    prefilled: float = 0.0
    first: float = 0.0
    first_answer: float = 0.0
    """When a block committed the first token after the thinking."""
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
    drafts: list[BlockDrafts] = field(default_factory=list[BlockDrafts])

    def __post_init__(self) -> None:
        self.hist = [0] * self.block
        self.by_position = [0] * (self.block - 1)

    def prompt_done(self) -> None:
        """Note that the prefill has ended."""
        self.prefilled = self.last = time.perf_counter()

    def cycle(self, block: Block, record: Record, count: int, proposal: Proposal) -> None:
        """Count a block of which `count` rows were committed, and what was proposed for it."""
        now, drafted = time.perf_counter(), proposal.drafted
        forced = [token >= 0 for token in block.forced]
        free = [not f for f in forced] + [True] * (self.block - len(forced))
        right = min(record.agreed, count, drafted)
        drafts, accepted = sum(free[:drafted]), sum(free[:right])
        for i in range(right):
            self.by_position[i] += free[i]
        for reason in block.reasons:
            if reason.what != "soft" or record.softened:
                self._note(reason)
        part = PhaseTotals(1, count, drafts, accepted, record.relaxed, 1e3 * (now - self.last))
        self.parts[block.phase] = self.parts.get(block.phase, PhaseTotals()).plus(part)
        self.drafts.append(_by_source(proposal, free[:drafted], right))
        self.first, self.last = self.first or now, now
        self.hist[count - 1] += 1
        self.drafted += drafts
        self.forced += sum(forced[:count])
        self.cycles += 1

    def closed(self, block: Block, record: Record, *, called: bool = False) -> None:
        """Note that thinking ended in this block, with a tool call if `called`."""
        natural: CloseKind = "soft" if record.softened else "natural"
        self.close = "call" if called else "hard" if block.phase == "closing" else natural

    def _note(self, reason: Reason) -> None:
        notes = self.notes.setdefault(reason, [])
        if notes and notes[-1].cycle + notes[-1].cycles == self.cycles:
            notes[-1] = replace(notes[-1], cycles=notes[-1].cycles + 1)
        else:
            notes.append(BlockNote(reason.what, reason.why, self.cycles))

    def answered(self, tokens: int) -> None:
        """Note that `tokens` of the answer are committed, those of the last block included."""
        if tokens and not self.first_answer:
            self.first_answer = self.last

    def _sources(self) -> dict[DraftSource, DraftCounts]:
        found: dict[DraftSource, DraftCounts] = {}
        for one in self.drafts:
            if one.drafted:
                counts = DraftCounts(1, one.drafted, one.accepted)
                found[one.source] = found.get(one.source, DraftCounts()).plus(counts)
            if (tail := one.tail) is not None:
                counts = DraftCounts(0, tail.drafted, tail.accepted)
                found[tail.source] = found.get(tail.source, DraftCounts()).plus(counts)
        return found

    def report(
        self,
        finish: str,
        progress: DecodeProgress,
        emitted: int,
        busy: Mapping[str, float] | None,
    ) -> RequestReport:
        """Return the totals of a request of which `emitted` tokens were yielded. `busy`: as the
        field, now; None if it could not be asked for.
        """
        now = time.perf_counter()
        prefilled = self.prefilled or now
        phases: dict[str, float] = {}
        if busy is not None:
            phases = {name: 1e3 * (busy[name] - self.busy.get(name, 0.0)) for name in busy}
            # Up to now, like `busy`: the last step may have committed nothing.
            phases["host"] = 1e3 * (now - self.start) - sum(phases.values())
        completion = len(progress.tokens)
        thinking = min(progress.thinking_tokens, emitted)
        return RequestReport(
            finish=finish,
            completion_tokens=completion,
            usage=Usage(
                prompt_tokens=len(progress.prompt),
                cached_tokens=self.cached,
                thinking_tokens=thinking,
                output_tokens=emitted - thinking,
            ),
            timings=Timings(
                prefill_ms=1e3 * (prefilled - self.start),
                ttft_ms=1e3 * (self.first - self.start) if self.first else 0.0,
                ttfa_ms=1e3 * (self.first_answer - self.start) if emitted > thinking else None,
                decode_ms=1e3 * (now - prefilled),
                e2e_ms=1e3 * (now - self.start),
                tok_s=rate(emitted, 1e3 * (now - prefilled)),
            ),
            phases_ms={name: ms for name, ms in phases.items() if ms},
            spec=Speculation(
                cycles=self.cycles,
                drafted=self.drafted,
                accepted=sum(self.by_position),
                accept_len=completion / self.cycles if self.cycles else 0.0,
                forced=self.forced,
                accept_hist=tuple(self.hist),
                accepted_per_position=tuple(self.by_position),
                sources=self._sources(),
            ),
            phases=self.parts,
            close=self.close,
            reuse=self.reuse,
            sampling=self.sampling,
            drafts=tuple(self.drafts),
            notes=tuple(sorted(chain(*self.notes.values()), key=lambda note: note.cycle)),
        )
