"""Relaxed acceptance: near misses of the drafter are accepted inside the thinking block.

The acceptance rules are those of the accept operator. This file decides when they apply: while
committed tokens are inside the thinking block, and in blocks that force nothing. Rows from the
first drafted closing mark on are strict, so the answer is exact given the thinking.

Source: FlashRT's relaxed matches, without its bug of taking a closed block for an open one;
TensorRT-LLM's relaxed acceptance, without its delay of one step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from thor_dflash.runtime.decoding.block import AcceptRule, Block, DecodeProgress, Policy, Reason


@dataclass(frozen=True, slots=True)
class RelaxedThinking(Policy):
    """Applies `relaxed` inside the thinking block."""

    relaxed: AcceptRule

    def shape(self, progress: DecodeProgress, block: Block) -> Block:
        if not progress.thinking or block.forced or not block.draft:
            return block
        return replace(
            block, relaxed=self.relaxed, reasons=(*block.reasons, Reason("relaxed", "thinking"))
        )
