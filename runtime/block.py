"""What policies decide about the next block, before and after the target has seen it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from thor_dflash.plugins.accept.reference import STRICT, Record
from thor_dflash.runtime.thinking import Marks, Thinking
from thor_dflash.tensors import Array

Finish = Literal["", "stop", "length", "grammar_dead_end"]
"""Why a request is over; "" while it is not."""

Phase = Literal["thinking", "closing", "answer"]
"""What the first row of a block belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxed:
    """Which drafts may be committed although the target would have chosen otherwise."""

    rule: int = STRICT
    top_k: int = 1
    margin: float = 0.0
    close: int = -1
    """A draft of this id ends it, itself included."""
    never: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a block is not simply as wide as it can be, drafted and exact."""

    what: Literal["capped", "forced", "soft", "gated", "relaxed"]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The next block's bounds. Policies narrow it one after another."""

    cap: int
    """Most rows to commit, 1..R."""
    phase: Phase = "answer"
    forced: tuple[int, ...] = ()
    """Ids that must follow rows 0, 1, ...; at most R. A look may leave -1: the model decides."""
    soft: tuple[int, ...] = ()
    """Ids rows 0, 1, ... choose if they are within soft_margin of the best, -1: none; at most R."""
    soft_margin: float = 0.0
    """Nats."""
    look: Look | None = None
    """Must see the drafts before they are verified: the step is cut in two, with a wait each."""
    mask: Callable[[], Array] | None = None
    """Makes int32 [R, ceil(vocab / 32)], the ids allowed after each row; None: all are. Called
    once, while the verify runs."""
    draft: bool = True
    """Ask the drafter."""
    ends: tuple[int, ...] = ()
    """Ids after which nothing more of the block is committed, beside the stop ids; they take places
    among those. No draft of them is accepted by `relaxed`."""
    drafted: int = 0
    """Tokens after the first that hold a draft or a forced id, 0..R - 1. Set by the loop."""
    relaxed: Relaxed = Relaxed()
    reasons: tuple[Reason, ...] = ()

    def capped(self, cap: int, why: str) -> Block:
        """Commit no more than `cap` rows."""
        if cap >= self.cap:
            return self
        return replace(self, cap=cap, reasons=(*self.reasons, Reason("capped", why)))

    def forcing(self, ids: Sequence[int], why: str) -> Block:
        """Commit these ids after rows 0, 1, ..., whatever the target would choose."""
        reasons = (*self.reasons, Reason("forced", why))
        return replace(self, forced=tuple(ids), reasons=reasons)

    def undrafted(self, why: str) -> Block:
        """Leave the drafter out of it."""
        return replace(self, draft=False, reasons=(*self.reasons, Reason("gated", why)))

    def because(self, before: Block, why: str) -> Block:
        """The reasons of what a look did to the block as it was before."""
        free = not any(token >= 0 for token in before.forced)
        forced = free and any(token >= 0 for token in self.forced)
        found = [Reason("forced", why)] * forced
        found += [Reason("capped", why)] * (self.cap < before.cap)
        return replace(self, reasons=(*self.reasons, *found))

    def holding(self, drafts: int, rows: int) -> Block:
        """Its tokens hold this many drafts, and forced ids in place of some and after the last."""
        held = drafts
        while held < len(self.forced) and self.forced[held] >= 0:
            held += 1
        return replace(self, drafted=min(held, rows - 1))


class Look(Protocol):
    """Narrows a block whose drafts are known: forced rows, cap and mask."""

    def __call__(self, tokens: tuple[int, ...], block: Block) -> Block:
        """`tokens` [R] are the last committed one and its drafts. A forced id replaces a draft."""
        ...


class Progress:
    """What one request has come to. Advanced by committed tokens only."""

    def __init__(self, prompt: Sequence[int], marks: Marks | None = None) -> None:
        self.prompt = tuple(prompt)
        self.marks = marks
        """The thinking marks of the vocabulary, if it has them."""
        self.tokens: list[int] = []
        """Committed after the prompt, stop token included."""
        self._thinking = Thinking(marks, self.prompt)

    @property
    def last(self) -> int:
        """The newest committed token."""
        return self.tokens[-1] if self.tokens else self.prompt[-1]

    @property
    def thinking(self) -> bool:
        """The next token belongs to the thinking block."""
        return self._thinking.inside

    def commit(self, tokens: Sequence[int]) -> bool:
        """Take the tokens of one block; tell whether thinking ended among them."""
        ended = False
        for token in tokens:
            ended |= self._thinking.feed(token) and not self._thinking.inside
        self.tokens.extend(tokens)
        return ended


class Policy(Protocol):
    """Shapes blocks and judges what came of them. Sees committed tokens, never touches state."""

    def shape(self, progress: Progress, block: Block) -> Block:
        """Narrow the next block."""
        ...

    def judge(self, progress: Progress, block: Block, record: Record) -> int:
        """Rows to commit, 0..record.count; 0 ends the request: nothing may follow. `block` is as it
        was verified, a look at its drafts included.
        """
        ...

    def observe(self, progress: Progress, committed: int) -> None:
        """Learn what was committed: the last `committed` of progress.tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Limit:
    """max_tokens: the last block is cut so that nothing past it is committed."""

    max_tokens: int

    def shape(self, progress: Progress, block: Block) -> Block:
        """See Policy."""
        return block.capped(self.max_tokens - len(progress.tokens), "max_tokens")

    def judge(self, progress: Progress, block: Block, record: Record) -> int:
        """See Policy."""
        return record.count

    def observe(self, progress: Progress, committed: int) -> None:
        """See Policy."""
