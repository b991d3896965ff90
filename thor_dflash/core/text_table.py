"""Tables of plain text."""

from __future__ import annotations

from collections.abc import Sequence


def columns(rows: Sequence[tuple[str, ...]], left: int = 1, indent: str = "") -> list[str]:
    """Rows of as many cells each as lines: the first `left` columns aligned to the left, the others
    to the right.
    """
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return [
        indent
        + "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
