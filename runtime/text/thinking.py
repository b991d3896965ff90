"""Whether an answer is inside its thinking block, from committed token ids alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Marks:
    """The ids that open and close a thinking block."""

    open: int
    close: int
    call: int = -1
    """The id that opens a tool call, which ends the thinking too; -1: no tools may be called."""

    @property
    def ends(self) -> tuple[int, ...]:
        """The ids that end the thinking."""
        return (self.close,) if self.call < 0 else (self.close, self.call)


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Some text of an answer, either all thinking or none."""

    text: str
    thinking: bool
    """Inside the thinking block, whose marks belong to it."""


class Thinking:
    """Follows an answer token by token.

    The prompt decides whether it starts inside: a chat template may have opened the block already,
    or opened and closed it. An answer that does not start inside may open one with its first token.
    """

    def __init__(self, marks: Marks | None, prompt: Sequence[int]) -> None:
        self._marks = marks
        self._fresh = True
        self.inside = _open_at_end(marks, prompt)
        """Whether the next token belongs to the thinking block."""

    def feed(self, token: int) -> bool:
        """Take one committed token; return whether it belongs to the block, marks included."""
        if self._marks is None:
            return False
        if token == self._marks.call:
            self._fresh = self.inside = False
            return False
        inside = self.inside or (self._fresh and token == self._marks.open)
        self._fresh = False
        self.inside = inside and token != self._marks.close
        return inside


def _open_at_end(marks: Marks | None, prompt: Sequence[int]) -> bool:
    if marks is None:
        return False
    last = next((t for t in reversed(prompt) if t in (marks.open, marks.close)), None)
    return last == marks.open
