"""The gate: the drafter is left out while plain decoding is faster.

A drafted cycle pays when it commits more tokens than `even`, its cost over that of a plain step.
Forced ids are not counted: what a plain step commits is them and one token that had a choice.
Both costs are measured in this process while it works. A moving average of what the drafts of a
request are worth is held against `even`, with some slack on both sides; while the gate is shut the
drafter is tried again as often as a fixed share of the time allows.

Source: the questions are Lucebox's gates', the answers mostly not: theirs shut for good, carried
one request's verdict into the next, and took the first, cold step for a cost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Literal

from thor_dflash.plugins.accept.reference import Record
from thor_dflash.runtime.block import Block, Progress

Mode = Literal["open", "shut", "probing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The gate's constants."""

    share: float = 0.15
    """Of the newest cycle in the average: a run of five misses is ordinary text, too."""
    slack: float = 0.05
    """Around even: costs differ by as much from cycle to cycle."""
    trust: float = 1.5
    """What drafts are taken to be worth before a request has shown any, times even."""
    sustain: int = 2
    """Cycles in a row the average must be too low."""
    warmup: int = 3
    """Cycles of a request before the average may shut the gate."""
    loss: float = 3.0
    """Plain steps a request may lose before the gate is shut at once, gains since set against."""
    plain: int = 3
    """Plain steps a process takes to know their cost, after as many drafted cycles."""
    probe: int = 3
    """Cycles of a trial; the first one carries the catching up."""
    upkeep: float = 0.015
    """Largest share of plain decoding's time spent on trials."""
    pause: int = 32
    """Fewest plain steps between trials."""


class Costs:
    """Seconds of a drafted cycle, of a plain step and of catching up: medians of the newest, since
    a step that met another process says nothing. One per process.
    """

    KEPT = 7

    def __init__(self) -> None:
        self._drafted = deque[float](maxlen=self.KEPT)
        self._plain = deque[float](maxlen=self.KEPT)
        self._behind = deque[float](maxlen=self.KEPT)

    def drafted(self, seconds: float) -> None:
        """A drafted cycle took this long."""
        self._drafted.append(seconds)

    def plain(self, seconds: float) -> None:
        """A plain step took this long."""
        self._plain.append(seconds)

    def caught_up(self, seconds: float) -> None:
        """The first drafted cycle after plain ones took this long."""
        if self._drafted:
            self._behind.append(max(0.0, seconds - median(self._drafted)))

    def known(self, least: int) -> bool:
        """Whether there are that many of both to go by: a process's first drafted cycle captures
        what later ones replay, and alone it would be the median.
        """
        return self.ready(least) and len(self._plain) >= min(least, self.KEPT)

    def ready(self, least: int) -> bool:
        """Whether there are that many drafted cycles to hold against plain steps."""
        return len(self._drafted) >= min(least, self.KEPT)

    @property
    def even(self) -> float:
        """Tokens that had a choice a drafted cycle must commit to be worth its time."""
        return median(self._drafted) / median(self._plain)

    def trial(self, cycles: int) -> float:
        """Seconds a trial of that many cycles takes, beyond the tokens it is sure to commit."""
        extra = max(0.0, median(self._drafted) - median(self._plain))
        return cycles * extra + (median(self._behind) if self._behind else 0.0)


class Gate:
    """Leaves the drafter out of blocks where it does not pay. One per request."""

    def __init__(self, costs: Costs, clock: Callable[[], float], rule: Rule) -> None:
        self._costs = costs
        self._clock = clock
        self._rule = rule
        self._mode: Mode = "open"
        self._worth: float | None = None
        """Moving average of tokens a drafted cycle; None before the costs are known."""
        self._cycles = 0
        """In this mode."""
        self._low = 0
        """Cycles in a row the average was too low."""
        self._lost = 0.0
        """Plain steps lost since drafts last paid."""
        self._plain_s = 0.0
        """Time of plain steps in this mode, seconds."""
        self._began = 0.0
        self._drafted = self._counts = True
        self._fresh = False
        """The next drafted cycle catches up first."""
        self._agreed = 0

    def shape(self, progress: Progress, block: Block) -> Block:
        """See Policy."""
        self._began, least = self._clock(), self._rule.plain
        if self._mode == "shut":
            block = block.undrafted("drafts do not pay")
        elif self._cycles and self._costs.ready(least) and not self._costs.known(least):
            block = block.undrafted("measuring a plain step")
        self._drafted = block.draft
        self._counts = not block.forced
        return block

    def judge(self, progress: Progress, block: Block, record: Record) -> int:
        """Drafts are worth what agreed, whatever else cuts the block; but for forced ids, which a
        plain step commits as well.
        """
        forced = sum(token >= 0 for token in block.forced[: record.agreed])
        self._agreed = record.agreed - forced
        return record.count

    def observe(self, progress: Progress, committed: int) -> None:
        """See Policy."""
        seconds = self._clock() - self._began
        self._cycles += 1
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
            self._worth = min(worth, even)  # what was lost outweighs what was trusted
            return True
        return self._cycles >= rule.warmup and self._low >= rule.sustain

    def _reopen(self, even: float, worth: float) -> None:
        """Out of shut: at once where plain steps turn out to cost more than was thought, else for
        a trial when the plain steps so far pay for it.
        """
        rule = self._rule
        if worth >= even * (1 + rule.slack) and self._cycles == rule.plain:
            self._enter("open")
        elif self._cycles >= rule.pause and (
            self._plain_s * rule.upkeep >= self._costs.trial(rule.probe)
        ):
            self._worth = even
            self._enter("probing")

    def _enter(self, mode: Mode) -> None:
        self._mode, self._cycles, self._low = mode, 0, 0
        self._lost = self._plain_s = 0.0
