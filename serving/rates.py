"""What a step costs on this machine, measured as it goes: deadlines and bounds come from it."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

WEIGHT = 0.2
"""Of a new measurement in a running mean: five plans back is history."""
RECENT = 512
"""Steps the worst one is looked for in."""
FIRST_STEP = 32
"""Tokens until a plan's first step is whole: goal and one call, as planner-nano writes them."""
MARGIN = 1.25
"""Of a predicted time, for what one mean does not tell."""


@dataclass(slots=True)
class Rates:
    """Running means. Written by the engine thread, read by all: single words, no lock."""

    cycle_ms: float = 0.0
    """One verify cycle."""
    chunk_ms: float = 0.0
    """One prefill step."""
    chunk_tokens: int = 64
    """Prompt tokens of a whole prefill step."""
    thinking_len: float = 1.0
    """Tokens a cycle commits while thinking."""
    answer_len: float = 1.0
    """Tokens a cycle commits in the answer."""
    answer_tokens: float = 160.0
    """Length of an answer. Starts at a plan of five steps."""
    e2e_ms: float = 0.0
    """One plan."""
    worst_chunk_ms: float = 0.0
    """The prefill step at the end of the longest prompt, measured before the first request."""
    _recent: deque[float] = field(default_factory=lambda: deque[float](maxlen=RECENT))

    def cycle(self, ms: float, tokens: int, thinking: bool) -> None:
        """A cycle committed `tokens`."""
        self.cycle_ms = _mean(self.cycle_ms, ms)
        if thinking:
            self.thinking_len = _mean(self.thinking_len, tokens)
        else:
            self.answer_len = _mean(self.answer_len, tokens)
        self._recent.append(ms)

    def chunk(self, ms: float) -> None:
        """A prefill step ran."""
        self.chunk_ms = _mean(self.chunk_ms, ms)
        self._recent.append(ms)

    def plan(self, ms: float, answer_tokens: int) -> None:
        """A plan was finished without being cut short."""
        self.e2e_ms = _mean(self.e2e_ms, ms)
        self.answer_tokens = _mean(self.answer_tokens, answer_tokens)

    def bound_ms(self) -> float:
        """Longest a cancel waits for the step under way, ms: twice the worst step, of those lately
        seen and the slowest prefill step there can be.
        """
        worst = max(self._recent.copy(), default=0.0)
        worst = max(worst, self.worst_chunk_ms)
        return max(1.0, math.ceil(2 * worst))

    def prefill_ms(self, tokens: int) -> float:
        """Predicted, for this many prompt tokens."""
        return self.chunk_ms * math.ceil(tokens / self.chunk_tokens)

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


def _mean(old: float, new: float) -> float:
    return new if not old else (1 - WEIGHT) * old + WEIGHT * new
