"""Proposers: who guesses the next block. May be wrong, is never trusted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from thor_dflash.config import AS_MADE, DraftConfig
from thor_dflash.runtime.block import Block, Progress
from thor_dflash.runtime.engine import Call
from thor_dflash.runtime.model import Model


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a proposer does about one block."""

    drafted: int
    """Tokens after the first it guesses. A forced id takes the place of a guess."""
    calls: Sequence[Call] = ()
    """Leave the block in the model's tokens; none where it is written already."""


class Proposer(Protocol):
    """Fills the block's tokens. Calls are enqueued around the verify, so a proposer that runs on
    the device costs no wait.
    """

    def begin(self, model: Model, rows: int) -> int:
        """A request starts; `rows` of its prompt will be prefilled. Returns the first of them whose
        taps this proposer wants, `rows` for none.
        """
        ...

    def propose(self, model: Model, progress: Progress, block: Block) -> Proposal:
        """Guess the next block."""
        ...

    def observe(self, model: Model, block: Block) -> Sequence[Call]:
        """Calls that take in the rows just verified."""
        ...

    def committed(self, model: Model, block: Block, count: int) -> None:
        """The first `count` rows of the last verify were committed."""
        ...


def _undrafted(model: Model, progress: Progress, block: Block) -> Proposal:
    model.write_tokens([progress.last, *block.forced])
    return Proposal(0)


@dataclass(frozen=True, slots=True)
class Nobody:
    """No drafts: one committed token a step, by the same block of the same shape."""

    def begin(self, model: Model, rows: int) -> int:
        """See Proposer."""
        model.state.first = rows
        return rows

    def propose(self, model: Model, progress: Progress, block: Block) -> Proposal:
        """See Proposer."""
        return _undrafted(model, progress, block)

    def observe(self, model: Model, block: Block) -> Sequence[Call]:
        """See Proposer."""
        return ()

    def committed(self, model: Model, block: Block, count: int) -> None:
        """See Proposer."""
        model.state.first = model.state.length


@dataclass(frozen=True, slots=True)
class Dflash:
    """The package's DFlash drafter.

    It takes in every committed row. Rows of blocks it was not asked about wait until it is asked
    again, and then go in many at a time.
    """

    config: DraftConfig = AS_MADE

    def begin(self, model: Model, rows: int) -> int:
        """See Proposer."""
        model.write_windows(self.config.window, self.config.full)
        seed = rows - self.config.seed if self.config.seed else 0
        model.state.first = max(model.state.first, seed)
        return model.state.first

    def propose(self, model: Model, progress: Progress, block: Block) -> Proposal:
        """See Proposer."""
        if not block.draft:
            return _undrafted(model, progress, block)
        model.catch_up()
        model.write_last(progress.last)
        model.write_first(self.config.context)
        return Proposal(model.block - 1, (model.call("propose"),))

    def observe(self, model: Model, block: Block) -> Sequence[Call]:
        """See Proposer."""
        return (model.call("observe"),) if block.draft else ()

    def committed(self, model: Model, block: Block, count: int) -> None:
        """See Proposer."""
        if not block.draft:
            model.hold(count)


@dataclass(frozen=True, slots=True)
class Guess:
    """Any function of what is committed: an oracle, a dead or hostile drafter, an n-gram table."""

    guess: Callable[[Progress], Sequence[int]]
    """progress -> up to R - 1 ids."""

    def begin(self, model: Model, rows: int) -> int:
        """See Proposer."""
        model.state.first = rows
        return rows

    def propose(self, model: Model, progress: Progress, block: Block) -> Proposal:
        """See Proposer."""
        if not block.draft:
            return _undrafted(model, progress, block)
        drafts = list(self.guess(progress))[: model.block - 1]
        drafts[: len(block.forced)] = block.forced
        model.write_tokens([progress.last, *drafts])
        return Proposal(len(drafts))

    def observe(self, model: Model, block: Block) -> Sequence[Call]:
        """See Proposer."""
        return ()

    def committed(self, model: Model, block: Block, count: int) -> None:
        """See Proposer."""
        model.state.first = model.state.length
