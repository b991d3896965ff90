"""max_tokens and max_answer: the last block is capped so that no more tokens are committed."""

from __future__ import annotations

from dataclasses import dataclass

from thor_dflash.runtime.decoding.block import Block, DecodeProgress, Policy


@dataclass(frozen=True, slots=True)
class TokenLimit(Policy):
    """Caps the last block."""

    max_tokens: int
    """Of thinking and answer together."""
    max_answer: int
    """Without the thinking."""

    def shape(self, progress: DecodeProgress, block: Block) -> Block:
        block = block.capped(self.max_tokens - len(progress.tokens), "max_tokens")
        # A block that closes the thinking has at least one row before the answer.
        left = self.max_answer - progress.answer_tokens + progress.thinking
        return block.capped(left, "max_answer")
