"""A drafter that costs as much as the real one but drafts noise, to test the speculation gate."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from thor_dflash.runtime.decoding.block import Block, DecodeProgress
from thor_dflash.runtime.decoding.model_runner import ModelRunner
from thor_dflash.runtime.decoding.proposers import DflashDrafter, Proposal
from thor_dflash.runtime.engines.protocol import Call


class NoiseDrafter:
    """A drafter with the full cost of the real one whose drafts are noise."""

    def __init__(self) -> None:
        self._inner = DflashDrafter()
        self._random = Random(7)

    def begin(self, model: ModelRunner, rows: int) -> int:
        """See Proposer."""
        return self._inner.begin(model, rows)

    def propose(self, model: ModelRunner, progress: DecodeProgress, block: Block) -> Proposal:
        """See Proposer."""
        made = self._inner.propose(model, progress, block)
        if made.drafted:
            model.engine.run(made.calls)
            limit = model.manifest.vocab_limit
            noise = [self._random.randrange(limit) for _ in range(made.drafted)]
            model.write_tokens([progress.last, *noise])
        return Proposal(made.drafted)

    def observe(self, model: ModelRunner, block: Block) -> Sequence[Call]:
        """See Proposer."""
        return self._inner.observe(model, block)

    def committed(self, model: ModelRunner, block: Block, count: int) -> None:
        """See Proposer."""
        self._inner.committed(model, block, count)
