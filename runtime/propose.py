"""Proposers: who guesses the next block. May be wrong, is never trusted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from thor_dflash.runtime.block import Block, Progress
from thor_dflash.runtime.engine import Call
from thor_dflash.runtime.model import Model


class Proposer(Protocol):
    """Fills the block's tokens. Calls are enqueued around the verify, so a proposer that runs on
    the device costs no wait.
    """

    @property
    def reads_taps(self) -> bool:
        """Wants the target's taps of every committed row, the prompt's included."""
        ...

    def propose(self, model: Model, progress: Progress, block: Block) -> Sequence[Call]:
        """Calls that leave the block in the model's tokens; or none, having written it."""
        ...

    def observe(self, model: Model) -> Sequence[Call]:
        """Calls that take in the rows just verified."""
        ...


def _anchor(progress: Progress) -> int:
    return progress.tokens[-1] if progress.tokens else progress.prompt[-1]


@dataclass(frozen=True, slots=True)
class Nobody:
    """No drafts: one committed token a step, by the same block of the same shape."""

    reads_taps: bool = False

    def propose(self, model: Model, progress: Progress, block: Block) -> Sequence[Call]:
        """See Proposer."""
        model.write_tokens([_anchor(progress), *block.forced])
        return ()

    def observe(self, model: Model) -> Sequence[Call]:
        """See Proposer."""
        return ()


@dataclass(frozen=True, slots=True)
class Dflash:
    """The package's DFlash drafter."""

    reads_taps: bool = True

    def propose(self, model: Model, progress: Progress, block: Block) -> Sequence[Call]:
        """See Proposer."""
        if not block.draft:
            model.write_tokens([_anchor(progress), *block.forced])
            return ()
        model.write_last(_anchor(progress))
        return (model.call("propose"),)

    def observe(self, model: Model) -> Sequence[Call]:
        """See Proposer."""
        return (model.call("observe"),)


@dataclass(frozen=True, slots=True)
class Guess:
    """Any function of what is committed: an oracle, a dead or hostile drafter, an n-gram table."""

    guess: Callable[[Progress], Sequence[int]]
    """progress -> up to R - 1 ids."""
    reads_taps: bool = False

    def propose(self, model: Model, progress: Progress, block: Block) -> Sequence[Call]:
        """See Proposer."""
        drafts = list(self.guess(progress))
        drafts[: len(block.forced)] = block.forced
        model.write_tokens([_anchor(progress), *drafts])
        return ()

    def observe(self, model: Model) -> Sequence[Call]:
        """See Proposer."""
        return ()
