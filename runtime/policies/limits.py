"""max_tokens: the last block is capped so that no more tokens than that are committed."""

from __future__ import annotations

from dataclasses import dataclass

from thor_dflash.plugins.accept.record import Record
from thor_dflash.runtime.decoding.block import Block, DecodeProgress


@dataclass(frozen=True, slots=True)
class TokenLimit:
    """max_tokens: caps the last block so that no more tokens than that are committed."""

    max_tokens: int

    def shape(self, progress: DecodeProgress, block: Block) -> Block:
        """See Policy."""
        return block.capped(self.max_tokens - len(progress.tokens), "max_tokens")

    def judge(self, progress: DecodeProgress, block: Block, record: Record) -> int:
        """See Policy."""
        return record.count

    def observe(self, progress: DecodeProgress, committed: int) -> None:
        """See Policy."""
