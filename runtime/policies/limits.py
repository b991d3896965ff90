"""max_tokens and max_answer: no more tokens are committed."""

from __future__ import annotations

from dataclasses import dataclass

from thor_dflash.plugins.accept.record import Record
from thor_dflash.runtime.decoding.block import Block, DecodeProgress, Policy


@dataclass(frozen=True, slots=True)
class TokenLimit(Policy):
    """Caps the last block; cuts the block that closes the thinking."""

    max_tokens: int
    """Of thinking and answer together."""
    max_answer: int
    """Without the thinking."""

    def shape(self, progress: DecodeProgress, block: Block) -> Block:
        block = block.capped(self.max_tokens - len(progress.tokens), "max_tokens")
        if progress.thinking:  # judge cuts the answer that follows in the same block
            return block
        return block.capped(self.max_answer - progress.answer_tokens, "max_answer")

    def judge(self, progress: DecodeProgress, block: Block, record: Record) -> int:
        tokens = record.tokens[: record.count]
        if not progress.thinking or progress.marks is None or progress.marks.close not in tokens:
            return record.count
        return min(record.count, tokens.index(progress.marks.close) + 1 + self.max_answer)
