"""Step times on this machine, measured while it serves. Deadline checks and bounds use them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from statistics import median

KEPT = 7
"""Newest times that a median is taken of: one step slowed by another process does not change it."""
LENGTHS = 32
"""Cycles over which the commit length is averaged. A mean, because the lengths add up to the
answer, which a median ignores; no length exceeds a block, so no outlier dominates."""
RECENT = 512
"""Newest steps among which the worst is taken."""
TRIAL = 8
"""The refusal of this number in a row, with no step measured in between, becomes a trial."""
FIRST_STEP = 32
"""Tokens until a plan's first step is complete: goal and one call, as planner-nano writes them."""
MARGIN = 1.25
"""Safety factor on predicted times, which are medians."""


@dataclass(slots=True)
class LatencyModel:
    """Recent measurements. Written by the engine thread, read by all threads without a lock: each
    field is read and written as one value.

    Only `refused` is also written by the thread that admits plans.
    """

    cycle_ms: float = 0.0
    """Time of a verify cycle."""
    step_sizes: tuple[int, ...] = (64,)
    """Possible rows of a prefill step, ascending. All but a prompt's last step have the most."""
    step_ms: dict[int, float] = field(default_factory=dict[int, float])
    """Time of a prefill step by its rows, for the sizes that have run."""
    tower_ms: dict[int, float] = field(default_factory=dict[int, float])
    """Time of the vision tower by the patches of its graph, for those that have run."""
    thinking_len: float = 1.0
    """Tokens committed per cycle while thinking."""
    answer_len: float = 1.0
    """Tokens committed per cycle in the answer."""
    best_len: float = math.inf
    """Most tokens per cycle of any answer so far, from its first token to a cycle that completed
    those of a first step. Unlimited before the first such answer."""
    answer_tokens: float = 160.0
    """Length of an answer. The default is that of a plan of five steps."""
    e2e_ms: float = 0.0
    """Time of a plan."""
    worst_step_ms: float = 0.0
    """Time of the prefill step at the end of the longest prompt, measured before the first request.
    """
    refused: int = 0
    """Plans refused for their deadline since a step was last measured."""
    _recent: deque[float] = field(default_factory=partial(deque[float], maxlen=RECENT))
    _cycles: deque[float] = field(default_factory=partial(deque[float], maxlen=KEPT))
    _steps: dict[int, deque[float]] = field(default_factory=dict[int, deque[float]])
    _towers: dict[int, deque[float]] = field(default_factory=dict[int, deque[float]])
    _thinking: deque[float] = field(default_factory=partial(deque[float], maxlen=LENGTHS))
    _answer: deque[float] = field(default_factory=partial(deque[float], maxlen=LENGTHS))
    _plans: deque[float] = field(default_factory=partial(deque[float], maxlen=KEPT))
    _answers: deque[float] = field(default_factory=partial(deque[float], maxlen=KEPT))

    def cycle(self, ms: float, tokens: int, thinking: bool) -> None:
        """Record a cycle that committed `tokens`; one without tokens counts only as a step."""
        self._ran(ms)
        if not tokens:
            return
        self.cycle_ms = _median(self._cycles, ms)
        if thinking:
            self.thinking_len = _mean(self._thinking, tokens)
        else:
            self.answer_len = _mean(self._answer, tokens)

    def step(self, ms: float, rows: int) -> None:
        """Record a prefill step."""
        self._ran(ms)
        kept = self._steps.setdefault(rows, deque(maxlen=KEPT))
        self.step_ms[rows] = _median(kept, ms)

    def encoded(self, ms: float, patches: int) -> None:
        """Record a run of the vision tower's graph for so many patches."""
        self._ran(ms)
        kept = self._towers.setdefault(patches, deque(maxlen=KEPT))
        self.tower_ms[patches] = _median(kept, ms)

    def encode_ms(self, graphs: Iterable[int]) -> float:
        """Predict the time of the vision tower by the patches of each graph that is to run; of one
        that has not run, nothing is known.
        """
        return sum(self.tower_ms.get(patches, 0.0) for patches in graphs)

    def _ran(self, ms: float) -> None:
        self._recent.append(ms)
        self.refused = 0

    def accepted(self, tokens: int, cycles: int) -> None:
        """Record how many cycles the answer under way has taken for its tokens so far."""
        if tokens >= FIRST_STEP:
            before = 0.0 if math.isinf(self.best_len) else self.best_len
            self.best_len = max(before, tokens / cycles)

    def plan(self, ms: float, answer_tokens: int) -> None:
        """Record a plan that was not cut short."""
        self.e2e_ms = _median(self._plans, ms)
        self.answer_tokens = _median(self._answers, answer_tokens)

    def bound_ms(self) -> float:
        """Return the longest that a cancel waits for the current step, ms: twice the worst step,
        which is the slowest of the recent steps and the slowest possible prefill step.
        """
        worst = max(self._recent.copy(), default=0.0)
        worst = max(worst, self.worst_step_ms)
        return max(1.0, math.ceil(2 * worst))

    def prefill_ms(self, tokens: int) -> float:
        """Predict the prefill time of a prompt; its last token is left to the first cycle."""
        whole, rest = divmod(max(0, tokens - 1), self.step_sizes[-1])
        last = next(rows for rows in self.step_sizes if rows >= rest)
        return whole * self._predicted(self.step_sizes[-1]) + self._predicted(last) * (rest > 0)

    def _predicted(self, rows: int) -> float:
        """Return the time of a step; for a size that has not run, of the next larger that has."""
        return next(
            (self.step_ms[n] for n in self.step_sizes if n >= rows and n in self.step_ms), 0.0
        )

    def answer_ms(self, max_tokens: int) -> float:
        """Predict the time of a typical answer, or of the longest allowed if that is shorter."""
        tokens = min(self.answer_tokens, max_tokens)
        return self.cycle_ms * tokens / self.answer_len

    def min_ms(
        self, prompt: int, max_tokens: int, *, whole: bool, graphs: Iterable[int] = ()
    ) -> float:
        """Predict the least time of a useful answer without thinking, ms: of the first step of a
        plan or, with `whole`, of an answer as short as the shortest recent one. `graphs`: as in
        `encode_ms`.

        The answer may be as easy to draft as the easiest so far: what an earlier one took must not
        refuse it.
        """
        shortest = min(self._answers.copy(), default=self.answer_tokens) if whole else FIRST_STEP
        cycles = max(1.0, min(shortest, max_tokens) / self.best_len)
        return self.encode_ms(graphs) + self.prefill_ms(prompt) + self.cycle_ms * cycles

    def thinking_tokens_left(
        self, left_ms: float, prompt: int, max_tokens: int, graphs: Iterable[int] = ()
    ) -> int:
        """Return how many thinking tokens leave time for the answer. `graphs`: see `encode_ms`."""
        needed = self.encode_ms(graphs) + self.prefill_ms(prompt) + self.answer_ms(max_tokens)
        spare = left_ms - MARGIN * needed
        if not self.cycle_ms:
            return 0
        return max(0, int(spare / MARGIN / self.cycle_ms * self.thinking_len))


def _median(kept: deque[float], new: float) -> float:
    kept.append(new)
    return median(kept)


def _mean(kept: deque[float], new: float) -> float:
    kept.append(new)
    return sum(kept) / len(kept)
