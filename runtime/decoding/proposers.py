"""Proposers draft the next block. A draft may be wrong: the target verifies every one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from thor_dflash.config.decode import NO_DRAFT_LIMITS, DraftConfig
from thor_dflash.core.errors import RequestError
from thor_dflash.core.results import DraftSource
from thor_dflash.runtime.decoding.block import NO_TAIL, Block, DecodeProgress, DraftTail
from thor_dflash.runtime.decoding.model_runner import ModelRunner
from thor_dflash.runtime.engines.protocol import Call


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a proposer drafts for one block."""

    drafted: int
    """Number of drafted tokens after the first. A forced id takes the place of a draft."""
    calls: Sequence[Call] = ()
    """Calls that write the block into the model's tokens; empty if it is already written."""
    drawn: int = 0
    """So many of the first drafts were drawn, for rejection, from distributions that the calls
    leave in `draft.candidates` and `draft.scores` (operator `sample`). Any other draft is a point
    mass: it is accepted if the target's own draw equals it."""
    source: DraftSource = "drafter"
    tail: DraftTail = NO_TAIL
    """The last of the drafts, if a text continues the drafter's."""


class Proposer(Protocol):
    """Fills the block's tokens. Its calls are enqueued around the verify, so a proposer that runs
    on the device adds no wait.
    """

    def begin(self, model: ModelRunner, rows: int) -> int:
        """Start a request; `rows` of its prompt will be prefilled. Return the first of them whose
        taps this proposer needs, or `rows` if it needs none.
        """
        ...

    def propose(self, model: ModelRunner, progress: DecodeProgress, block: Block) -> Proposal:
        """Draft the next block."""
        ...

    def observe(self, model: ModelRunner, block: Block) -> Sequence[Call]:
        """Return the calls that take in the rows just verified."""
        ...

    def committed(self, model: ModelRunner, block: Block, count: int) -> None:
        """Take note that the first `count` rows of the last verify were committed."""
        ...


def begin_drafter(
    model: ModelRunner, rows: int, config: DraftConfig, kind: Literal["dflash", "mtp"]
) -> int:
    """What `begin` does for a package's own drafter of this kind.

    Raises:
        RequestError: the package has none.
    """
    if (own := model.manifest.own_drafter) != kind:
        raise RequestError(f"drafter must be {own}, the package's (got {kind})")
    model.write_windows(config.window, config.full)
    seed = rows - config.seed if config.seed else 0
    model.state.first = max(model.state.first, seed)
    return model.state.first


def undrafted(model: ModelRunner, progress: DecodeProgress, block: Block) -> Proposal:
    """Write the last token and what is forced after it."""
    model.write_tokens([progress.last, *block.forced])
    return Proposal(0)


@dataclass(frozen=True, slots=True)
class NoDrafter:
    """No drafts: each step commits one token, in a block of the same shape."""

    def begin(self, model: ModelRunner, rows: int) -> int:
        model.state.first = rows
        return rows

    def propose(self, model: ModelRunner, progress: DecodeProgress, block: Block) -> Proposal:
        return undrafted(model, progress, block)

    def observe(self, model: ModelRunner, block: Block) -> Sequence[Call]:
        return ()

    def committed(self, model: ModelRunner, block: Block, count: int) -> None:
        model.state.first = model.state.length


@dataclass(frozen=True, slots=True)
class DflashDrafter:
    """The package's DFlash drafter.

    It takes in every committed row. Rows of blocks it did not draft are held until it next drafts,
    and then taken in many at a time.
    """

    config: DraftConfig = NO_DRAFT_LIMITS

    def begin(self, model: ModelRunner, rows: int) -> int:
        """See begin_drafter."""
        return begin_drafter(model, rows, self.config, "dflash")

    def propose(self, model: ModelRunner, progress: DecodeProgress, block: Block) -> Proposal:
        if not block.draft:
            return undrafted(model, progress, block)
        model.catch_up()
        model.write_last(progress.last)
        model.write_first(self.config.context)
        drafts, tail = model.drafts, block.tail
        if model.wide:
            model.write_ids([progress.last, *block.forced], tail.ids)
        if not block.sampled:
            return Proposal(drafts + len(tail.ids), (model.call("propose"),), tail=tail)
        rejection = block.rejection and not model.wide
        calls = model.call("propose"), model.call("sample_drafts" + "_rejection" * rejection)
        return Proposal(drafts + len(tail.ids), calls, drafts * rejection, tail=tail)

    def observe(self, model: ModelRunner, block: Block) -> Sequence[Call]:
        if not block.draft:
            return ()
        model.catch_up()  # another proposer may have drafted
        return (model.call("observe"),)

    def committed(self, model: ModelRunner, block: Block, count: int) -> None:
        if not block.draft:
            model.hold(count)


@dataclass(frozen=True, slots=True)
class CallableDrafter:
    """Drafts by any function of the committed tokens: an oracle, a hostile drafter, n-grams."""

    guess: Callable[[DecodeProgress], Sequence[int]]
    """progress -> up to R - 1 ids."""

    def begin(self, model: ModelRunner, rows: int) -> int:
        model.state.first = rows
        return rows

    def propose(self, model: ModelRunner, progress: DecodeProgress, block: Block) -> Proposal:
        if not block.draft:
            return undrafted(model, progress, block)
        drafts = list(self.guess(progress))[: model.block - 1]
        drafts[: len(block.forced)] = block.forced
        model.write_tokens([progress.last, *drafts])
        return Proposal(len(drafts))

    def observe(self, model: ModelRunner, block: Block) -> Sequence[Call]:
        return ()

    def committed(self, model: ModelRunner, block: Block, count: int) -> None:
        model.state.first = model.state.length
