"""The record that accept writes: the decision on one block."""

from __future__ import annotations

from dataclasses import dataclass

from thor_dflash.core.tensors import Array

HEADER = 5
"""Words before the per-row words."""

STRICT, LOG_MARGIN, PROBABILITY_DELTA = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Record:
    """The decision on one block."""

    count: int
    """Rows to commit, 1..R."""
    fault: int
    """The committed row without a usable choice; -1: none."""
    relaxed: int
    """Committed drafts that strict acceptance would have refused."""
    agreed: int
    """Drafts that agreed, before cap and stop ids shorten the commit, 0..R - 1."""
    softened: int
    """Committed rows whose choice was a soft id in place of the best one."""
    tokens: tuple[int, ...]
    """[count] the committed tokens: the one that follows each committed row."""
    choices: tuple[int, ...]
    """[R] the target's own choice after each row, -1 at a fault."""

    @classmethod
    def read(cls, words: Array) -> Record:
        """Reads a record from the operator's int32 [5 + 2R] output."""
        values: list[int] = words.tolist()
        rows = (len(values) - HEADER) // 2
        count, fault, relaxed, agreed, softened = values[:HEADER]
        return cls(
            count,
            fault,
            relaxed,
            agreed,
            softened,
            tokens=tuple(values[HEADER : HEADER + values[0]]),
            choices=tuple(values[HEADER + rows :]),
        )
