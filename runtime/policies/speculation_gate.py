"""The gate: skips the drafter while plain decoding is faster.

A drafted cycle pays off when it commits more tokens than `even`, the ratio of its cost to that of a
plain step. Forced ids are not counted: a plain step commits them too, plus one token that had a
choice. Both costs are measured in this process while it works. A moving average of the tokens that
a request's drafted cycles commit is compared with `even`, with some slack on both sides. While the
gate is shut, the drafter is tried again as often as a fixed share of the time allows.

Source: the idea is that of Lucebox's gates, but most of the rules differ: theirs shut for good,
carried one request's verdict into the next, and took the first, cold step as the cost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Literal

from thor_dflash.plugins.accept.record import Record
from thor_dflash.runtime.decoding.block import Block, DecodeProgress, Policy

GateMode = Literal["open", "shut", "probing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GateRule:
    """The gate's constants."""

    share: float = 0.15
    """Weight of the newest cycle in the average; small: ordinary text has runs of five misses."""
    slack: float = 0.05
    """Relative band around `even`: costs vary by as much from cycle to cycle."""
    trust: float = 1.5
    """Initial value of a request's average, as a multiple of `even`."""
    sustain: int = 2
    """Consecutive cycles for which the average must be too low."""
    warmup: int = 3
    """Cycles of a request before the average may shut the gate."""
    loss: float = 3.0
    """Net loss of a request, in plain steps, above which the gate is shut at once."""
    plain: int = 3
    """Plain steps a process takes to measure their cost, after as many drafted cycles."""
    probe: int = 3
    """Cycles of a trial; the first includes catching up."""
    upkeep: float = 0.015
    """Largest share of the time of plain decoding that may be spent on trials."""
    pause: int = 32
    """Minimum plain steps between trials."""


class StepCosts:
    """Seconds of a drafted cycle, of a plain step and of catching up: medians of the newest, so
    that a step disturbed by another process does not count. One per process.
    """

    KEPT = 7

    def __init__(self) -> None:
        self._drafted = deque[float](maxlen=self.KEPT)
        self._plain = deque[float](maxlen=self.KEPT)
        self._behind = deque[float](maxlen=self.KEPT)

    def drafted(self, seconds: float) -> None:
        """Record the time of a drafted cycle."""
        self._drafted.append(seconds)

    def plain(self, seconds: float) -> None:
        """Record the time of a plain step."""
        self._plain.append(seconds)

    def caught_up(self, seconds: float) -> None:
        """Record the time of the first drafted cycle after plain ones."""
        if self._drafted:
            self._behind.append(max(0.0, seconds - median(self._drafted)))

    def known(self, least: int) -> bool:
        """Whether there are `least` measurements of both. One is not enough: a process's first
        drafted cycle captures what later ones replay, so it is slower.
        """
        return self.ready(least) and len(self._plain) >= min(least, self.KEPT)

    def ready(self, least: int) -> bool:
        """Whether there are `least` measurements of drafted cycles."""
        return len(self._drafted) >= min(least, self.KEPT)

    @property
    def even(self) -> float:
        """Unforced tokens that a drafted cycle must commit to be worth its time."""
        return median(self._drafted) / median(self._plain)

    def trial(self, cycles: int) -> float:
        """Seconds that a trial of `cycles` takes beyond as many plain steps."""
        extra = max(0.0, median(self._drafted) - median(self._plain))
        return cycles * extra + (median(self._behind) if self._behind else 0.0)


class SpeculationGate(Policy):
    """Skips the drafter in blocks where it does not pay off. One per request."""

    def __init__(self, costs: StepCosts, clock: Callable[[], float], rule: GateRule) -> None:
        self._costs = costs
        self._clock = clock
        self._rule = rule
        self._mode: GateMode = "open"
        self._worth: float | None = None
        """Moving average of tokens per drafted cycle; None before the costs are known."""
        self._cycles = 0
        """Cycles in this mode."""
        self._low = 0
        """Consecutive cycles for which the average was too low."""
        self._lost = 0.0
        """Net loss in this mode, in plain steps, never below 0."""
        self._plain_s = 0.0
        """Time of plain steps in this mode, seconds."""
        self._began = 0.0
        self._drafted = self._counts = True
        self._text = False
        """A text drafted the block where the drafter would have: it tells nothing of its worth."""
        self._fresh = False
        """The next drafted cycle catches up first."""
        self._agreed = 0
        self._reached = 0
        """Drafts that agreed and were drawn by their own law; they must not decide what follows
        unless they were committed, as their noise is used again (operator `sample`)."""

    def shape(self, progress: DecodeProgress, block: Block) -> Block:
        self._began, least = self._clock(), self._rule.plain
        if self._mode == "shut":
            block = block.undrafted("drafts do not pay")
        elif self._cycles and self._costs.ready(least) and not self._costs.known(least):
            block = block.undrafted("measuring a plain step")
        self._drafted = block.draft
        self._counts = not block.forced
        return block

    def judge(self, progress: DecodeProgress, block: Block, record: Record) -> int:
        """Note how many drafts agreed, even if something else cut the block. Forced ids are not
        counted, since a plain step commits them too.
        """
        forced = sum(token >= 0 for token in block.forced[: record.agreed])
        self._agreed = record.agreed - forced
        self._reached = record.agreed if block.drawn else 0
        self._text = block.draft and block.source != "drafter"
        return record.count

    def observe(self, progress: DecodeProgress, committed: int) -> None:
        seconds = self._clock() - self._began
        if self._text:
            return
        self._cycles += 1
        self._counts = self._counts and self._reached < committed
        if not self._drafted:
            self._costs.plain(seconds)
            self._plain_s += seconds
            self._fresh = True
        elif self._fresh:
            self._costs.caught_up(seconds)
            self._fresh = False
        else:
            self._costs.drafted(seconds)
        if self._costs.known(self._rule.plain):
            self._decide()

    def _decide(self) -> None:
        even = self._costs.even
        if self._worth is None:
            self._worth = self._rule.trust * even
        elif self._drafted and self._counts:
            self._worth += self._rule.share * (self._agreed + 1 - self._worth)
        if self._mode == "shut":
            self._reopen(even, self._worth)
        elif self._mode == "probing":
            if self._cycles >= self._rule.probe:
                pays = self._worth >= even * (1 + self._rule.slack)
                self._enter("open" if pays else "shut")
        elif self._drafted and self._counts and self._hopeless(even, self._worth):
            self._enter("shut")

    def _hopeless(self, even: float, worth: float) -> bool:
        rule = self._rule
        self._lost = max(0.0, self._lost + even - self._agreed - 1)
        self._low = self._low + 1 if worth < even * (1 - rule.slack) else 0
        if self._lost > rule.loss:
            self._worth = min(worth, even)  # the loss outweighs the initial trust
            return True
        return self._cycles >= rule.warmup and self._low >= rule.sustain

    def _reopen(self, even: float, worth: float) -> None:
        """Leave the shut mode: at once if plain steps turn out to cost more than was measured
        before, else for a trial once the plain steps so far pay for it.
        """
        rule = self._rule
        if worth >= even * (1 + rule.slack) and self._cycles == rule.plain:
            self._enter("open")
        elif self._cycles >= rule.pause and (
            self._plain_s * rule.upkeep >= self._costs.trial(rule.probe)
        ):
            self._worth = even
            self._enter("probing")

    def _enter(self, mode: GateMode) -> None:
        self._mode, self._cycles, self._low = mode, 0, 0
        self._lost = self._plain_s = 0.0
