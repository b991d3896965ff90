"""Forced answers: given ids are committed, whatever the target would choose.

For replaying a recorded conversation: the state becomes that of the recorded answer, through the
ordinary cycles of an answer of that length. The target's choices are not used, so nothing of this
is an answer of the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from thor_dflash.runtime.decoding.block import Block, DecodeProgress, Policy

WHY = "forced answer"


@dataclass(slots=True)
class ForcedAnswer(Policy):
    """Commits `ids`. One per run of a request, whose max_tokens must be their number."""

    ids: tuple[int, ...]
    rows: float | None
    """Tokens to commit per cycle, 1..R, an assumed acceptance; a fraction is met on average. None:
    as many as the drafter's drafts agree with the ids, and one."""
    _cycles: int = 0

    def shape(self, progress: DecodeProgress, block: Block) -> Block:
        rest = self.ids[len(progress.tokens) :]
        if self.rows is None:
            return replace(block, look=partial(_agreed, rest))
        count = math.floor((self._cycles + 1) * self.rows) - math.floor(self._cycles * self.rows)
        capped = block.capped(count, WHY)
        return capped.forcing(rest[: capped.cap], WHY)

    def observe(self, progress: DecodeProgress, committed: int) -> None:
        self._cycles += 1


def _agreed(rest: Sequence[int], tokens: tuple[int, ...], block: Block) -> Block:
    """Force the ids as far as the drafts agree with them, and the next one, which the target would
    have chosen."""
    pairs = zip(tokens[1:], rest, strict=False)
    agreed = next((i for i, (draft, must) in enumerate(pairs) if draft != must), len(tokens) - 1)
    count = min(agreed + 1, block.cap, len(rest))
    return replace(block, forced=tuple(rest[:count]), cap=count)
