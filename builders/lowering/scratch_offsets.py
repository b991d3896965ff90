"""Places the intermediate values of a program in scratch memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Lifetime:
    """A value's lifetime: from the step that writes it to the last that reads it, inclusive."""

    name: str
    nbytes: int
    first: int
    last: int


def assign_offsets(lives: Sequence[Lifetime]) -> tuple[dict[str, int], int]:
    """Assign offsets so that values alive at the same time never overlap. Returns them and the
    total size, bytes.

    Largest first, each at the lowest offset that is free for its whole lifetime (greedy by size;
    Pisarchyk and Lee 2020).
    """
    placed: list[tuple[int, Lifetime]] = []
    for life in sorted(lives, key=lambda v: (-v.nbytes, v.first, v.name)):
        busy = sorted(
            (offset, offset + other.nbytes)
            for offset, other in placed
            if other.first <= life.last and life.first <= other.last
        )
        at = 0
        for start, end in busy:
            if start - at >= life.nbytes:
                break
            at = max(at, end)
        placed.append((at, life))
    total = max((offset + life.nbytes for offset, life in placed), default=0)
    return {life.name: offset for offset, life in placed}, total
