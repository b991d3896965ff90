"""A thinking budget: stages THINK -> CLOSING -> REPLY, advanced by committed tokens only.

In THINK a block is capped to end where the budget does. In CLOSING the message that closes thinking
is committed as forced rows of ordinary blocks. In REPLY there is nothing left to do. A block that
closes thinking by itself leads to REPLY at once. Verify, drafter and state treat a forced row like
any other.

Source: Lucebox's thinking-budget hook, level 2: the numbers and the rule about the message's first
id; not its hand-over to plain decoding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from thor_dflash.runtime.decoding.block import Block, DecodeProgress, Policy, Reason

WHY = "thinking budget"
BudgetStage = Literal["think", "closing", "reply"]


@dataclass(frozen=True, slots=True)
class SoftClose:
    """Soft close: thinking may end early where the closing mark is nearly the best id."""

    start: int
    """Tokens of the answer before which no row is soft."""
    margin: float
    """Largest logit distance of the closing mark from the best id, nats."""


@dataclass(slots=True)
class ThinkingBudget(Policy):
    """Closes thinking once it has used up its tokens. One per request."""

    limit: int
    """Tokens of the answer after which thinking is closed."""
    close: tuple[int, ...]
    """Ids of the closing message."""
    soft: SoftClose | None = None
    _stage: BudgetStage = "think"
    _closed: int = 0
    """Ids of `close` committed."""

    def shape(self, progress: DecodeProgress, block: Block) -> Block:
        self._advance(progress)
        if self._stage == "closing":
            ids = self.close[self._closed : self._closed + block.cap]
            return replace(block.forcing(ids, WHY), phase="closing")
        if self._stage == "think":
            done = len(progress.tokens)
            return self._soften(progress, block.capped(self.limit - done, WHY))
        return block

    def observe(self, progress: DecodeProgress, committed: int) -> None:
        if self._stage == "closing":
            self._closed += committed

    def _advance(self, progress: DecodeProgress) -> None:
        if self._stage == "think" and not progress.thinking:
            self._stage = "reply"
        if self._stage == "think" and len(progress.tokens) >= self.limit:
            self._stage = "closing"
            # If the last committed token is the message's first id, the message has begun already.
            self._closed = int(progress.tokens[-1:] == [self.close[0]])
        if self._stage == "closing" and self._closed >= len(self.close):
            self._stage = "reply"

    def _soften(self, progress: DecodeProgress, block: Block) -> Block:
        done, marks = len(progress.tokens), progress.marks
        if self.soft is None or marks is None or done + block.cap <= self.soft.start:
            return block
        start = self.soft.start
        soft = tuple(marks.close if done + i >= start else -1 for i in range(block.cap))
        reasons = (*block.reasons, Reason("soft", WHY))
        # Rows after the end of the thinking belong to the answer, where nothing is soft. End the
        # block there; the next block does those rows again.
        return replace(
            block,
            soft=soft,
            soft_margin=self.soft.margin,
            ends=(*block.ends, *marks.ends),
            reasons=reasons,
        )
