"""What a step costs on this machine, measured as it goes: deadlines and bounds come from it."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from statistics import median

KEPT = 7
"""Of the newest times, to take the median of: one that met another process changes nothing."""
LENGTHS = 32
"""Cycles that commit lengths are the mean of. None is longer than a block, so none outweighs the
others, and the sum of them is what an answer is made of: a median is not."""
RECENT = 512
"""Steps the worst one is looked for in."""
TRIAL = 8
"""Refusals in a row, nothing being measured between them, the last of which is a trial instead."""
FIRST_STEP = 32
"""Tokens until a plan's first step is whole: goal and one call, as planner-nano writes them."""
MARGIN = 1.25
"""Of a predicted time, for what one median does not tell."""


@dataclass(slots=True)
class Rates:
    """What was lately measured. Written by the engine thread, read by all: single words, no lock.

    Only `refused` is also written by whoever admits plans.
    """

    cycle_ms: float = 0.0
    """One verify cycle."""
    step_sizes: tuple[int, ...] = (64,)
    """Rows that a prefill step may have, ascending: all but a prompt's last have most."""
    step_ms: dict[int, float] = field(default_factory=dict[int, float])
    """One prefill step, by its rows: of those sizes that have run."""
    thinking_len: float = 1.0
    """Tokens a cycle commits while thinking."""
    answer_len: float = 1.0
    """Tokens a cycle commits in the answer."""
    answer_tokens: float = 160.0
    """Length of an answer. Until the first one, a plan of five steps."""
    e2e_ms: float = 0.0
    """One plan."""
    worst_step_ms: float = 0.0
    """The prefill step at the end of the longest prompt, measured before the first request."""
    refused: int = 0
    """Plans refused for their deadline since a step was last measured."""
    _recent: deque[float] = field(default_factory=partial(deque[float], maxlen=RECENT))
    _cycles: deque[float] = field(default_factory=partial(deque[float], maxlen=KEPT))
    _steps: dict[int, deque[float]] = field(default_factory=dict[int, deque[float]])
    _thinking: deque[float] = field(default_factory=partial(deque[float], maxlen=LENGTHS))
    _answer: deque[float] = field(default_factory=partial(deque[float], maxlen=LENGTHS))
    _plans: deque[float] = field(default_factory=partial(deque[float], maxlen=KEPT))
    _answers: deque[float] = field(default_factory=partial(deque[float], maxlen=KEPT))

    def cycle(self, ms: float, tokens: int, thinking: bool) -> None:
        """A cycle committed `tokens`; one that committed none says nothing of the others."""
        self._ran(ms)
        if not tokens:
            return
        self.cycle_ms = _median(self._cycles, ms)
        if thinking:
            self.thinking_len = _mean(self._thinking, tokens)
        else:
            self.answer_len = _mean(self._answer, tokens)

    def step(self, ms: float, rows: int) -> None:
        """A prefill step ran."""
        self._ran(ms)
        kept = self._steps.setdefault(rows, deque(maxlen=KEPT))
        self.step_ms[rows] = _median(kept, ms)

    def _ran(self, ms: float) -> None:
        self._recent.append(ms)
        self.refused = 0

    def plan(self, ms: float, answer_tokens: int) -> None:
        """A plan was finished without being cut short."""
        self.e2e_ms = _median(self._plans, ms)
        self.answer_tokens = _median(self._answers, answer_tokens)

    def bound_ms(self) -> float:
        """Longest a cancel waits for the step under way, ms: twice the worst step, of those lately
        seen and the slowest prefill step there can be.
        """
        worst = max(self._recent.copy(), default=0.0)
        worst = max(worst, self.worst_step_ms)
        return max(1.0, math.ceil(2 * worst))

    def prefill_ms(self, tokens: int) -> float:
        """Predicted, for this many prompt tokens, the last of which is for the first cycle."""
        whole, rest = divmod(max(0, tokens - 1), self.step_sizes[-1])
        last = next(rows for rows in self.step_sizes if rows >= rest)
        return whole * self._predicted(self.step_sizes[-1]) + self._predicted(last) * (rest > 0)

    def _predicted(self, rows: int) -> float:
        """Of a size that has not run yet: what the next larger one takes that has."""
        return next(
            (self.step_ms[n] for n in self.step_sizes if n >= rows and n in self.step_ms), 0.0
        )

    def answer_ms(self, max_tokens: int) -> float:
        """Predicted, for a usual answer or the longest allowed."""
        tokens = min(self.answer_tokens, max_tokens)
        return self.cycle_ms * tokens / self.answer_len

    def min_ms(self, prompt: int, max_tokens: int, *, whole: bool) -> float:
        """Least time a useful answer takes without thinking: a whole one, or a first step."""
        tokens = max_tokens if whole else min(FIRST_STEP, max_tokens)
        return self.prefill_ms(prompt) + self.answer_ms(tokens)

    def thinking_room(self, left_ms: float, prompt: int, max_tokens: int) -> int:
        """Tokens of thinking that leave time for the answer."""
        spare = left_ms - MARGIN * (self.prefill_ms(prompt) + self.answer_ms(max_tokens))
        if not self.cycle_ms:
            return 0
        return max(0, int(spare / MARGIN / self.cycle_ms * self.thinking_len))


def _median(kept: deque[float], new: float) -> float:
    kept.append(new)
    return median(kept)


def _mean(kept: deque[float], new: float) -> float:
    kept.append(new)
    return sum(kept) / len(kept)
