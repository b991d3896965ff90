"""What policies decide about the next block, before and after the target has seen it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from thor_dflash.plugins.accept.reference import STRICT, Record
from thor_dflash.tensors import Array

Finish = Literal["", "stop", "length", "grammar_dead_end"]
"""Why a request is over; "" while it is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxed:
    """Which drafts may be committed although the target would have chosen otherwise."""

    rule: int = STRICT
    top_k: int = 1
    margin: float = 0.0
    close: int = -1
    """A draft of this id ends it, itself included."""
    never: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The next block's bounds. Policies narrow it one after another."""

    cap: int
    """Most rows to commit, 1..R."""
    forced: tuple[int, ...] = ()
    """Ids that must follow rows 0, 1, ...; at most R. A look may leave -1: the model decides."""
    look: Look | None = None
    """Must see the drafts before they are verified: the step is cut in two, with a wait each."""
    mask: Callable[[], Array] | None = None
    """Makes int32 [R, ceil(vocab / 32)], the ids allowed after each row; None: all are. Called
    once, while the verify runs."""
    draft: bool = True
    """Ask the drafter."""
    relaxed: Relaxed = Relaxed()
    finish: Finish = ""
    """Not empty: there is no next block, the request ends here."""


class Look(Protocol):
    """Narrows a block whose drafts are known: forced rows, cap and mask."""

    def __call__(self, tokens: tuple[int, ...], block: Block) -> Block:
        """`tokens` [R] are the last committed one and its drafts. A forced id replaces a draft."""
        ...


@dataclass(slots=True, kw_only=True)
class Progress:
    """What one request has come to. Advanced by committed tokens only."""

    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list[int])
    """Committed after the prompt, stop token included."""


class Policy(Protocol):
    """Shapes blocks and judges what came of them. Sees committed tokens, never touches state."""

    def shape(self, progress: Progress, block: Block) -> Block:
        """Narrow the next block."""
        ...

    def judge(self, progress: Progress, record: Record) -> int:
        """Rows to commit, 1..record.count."""
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
        left = self.max_tokens - len(progress.tokens)
        return replace(block, cap=min(block.cap, left))

    def judge(self, progress: Progress, record: Record) -> int:
        """See Policy."""
        return record.count

    def observe(self, progress: Progress, committed: int) -> None:
        """See Policy."""
