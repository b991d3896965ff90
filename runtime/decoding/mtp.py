"""The MTP drafter: a layer of the target's checkpoint that drafts one token after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thor_dflash.config.decode import NO_DRAFT_LIMITS, DraftConfig
from thor_dflash.package.manifest import Manifest
from thor_dflash.runtime.decoding.block import Block, DecodeProgress
from thor_dflash.runtime.decoding.model_runner import ModelRunner
from thor_dflash.runtime.decoding.proposers import (
    DflashDrafter,
    NoDrafter,
    Proposal,
    Proposer,
    begin_drafter,
    undrafted,
)
from thor_dflash.runtime.engines.protocol import Call


@dataclass(slots=True)
class MtpDrafter:
    """The package's MTP layer.

    Its row for a token needs the token and the target's row before it, so committed rows wait until
    the token after the last of them is known: until it next drafts. They stay where the verify left
    them, or are held on the host if another proposer drafts before.
    """

    config: DraftConfig = NO_DRAFT_LIMITS
    _drafted: bool = False
    """It drafted the block under way, and so has taken in the rows that are held."""

    def begin(self, model: ModelRunner, rows: int) -> int:
        """See begin_drafter."""
        self._drafted = False
        return begin_drafter(model, rows, self.config, "mtp")

    def propose(self, model: ModelRunner, progress: DecodeProgress, block: Block) -> Proposal:
        """See Proposer. The first token of a prompt of one has no row before it to draft from."""
        state, tail = model.state, block.tail
        if not block.draft or not state.length:
            return undrafted(model, progress, block)
        held = sum(map(len, state.behind)) + state.fresh or 1
        newest = [*progress.prompt[-held:], *progress.tokens[-held:]]
        model.chain(newest, self.config.context)
        model.write_ids([progress.last, *block.forced], tail.ids)
        self._drafted = True
        call = model.call("propose_sampled" if block.sampled else "propose")
        return Proposal(model.drafts + len(tail.ids), (call,), tail=tail)

    def observe(self, model: ModelRunner, block: Block) -> Sequence[Call]:
        """See Proposer."""
        if not self._drafted:
            model.settle()
        return ()

    def committed(self, model: ModelRunner, block: Block, count: int) -> None:
        """See Proposer."""
        if self._drafted:
            model.state.behind.clear()
        self._drafted = False
        model.state.fresh = count


def own_drafter(manifest: Manifest, config: DraftConfig = NO_DRAFT_LIMITS) -> Proposer:
    """The package's drafter, or none."""
    match manifest.own_drafter:
        case "dflash":
            return DflashDrafter(config)
        case "mtp":
            return MtpDrafter(config)
        case "none":
            return NoDrafter()
