"""What policies decide about the next block, before and after the target has seen it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from thor_dflash.plugins.accept.reference import STRICT, Record
from thor_dflash.tensors import Array


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
    """Ids that must follow rows 0, 1, ...; at most R."""
    mask: Array | None = None
    """int32 [R, ceil(vocab / 32)]: ids allowed after each row; None: all."""
    draft: bool = True
    """Ask the drafter."""
    relaxed: Relaxed = Relaxed()


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
        return Block(
            cap=min(block.cap, left),
            forced=block.forced,
            mask=block.mask,
            draft=block.draft,
            relaxed=block.relaxed,
        )

    def judge(self, progress: Progress, record: Record) -> int:
        """See Policy."""
        return record.count

    def observe(self, progress: Progress, committed: int) -> None:
        """See Policy."""
