"""Fewer cases than a product of parameters has: every pair of values is in one of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def rows_of_pairs(values: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Returns rows with a value of each parameter, so that every two values of different
    parameters stand in a row together. The first rows have most of what is new.
    """
    every = list(itertools.product(*(range(len(x)) for x in values)))
    left = set().union(*map(_covered, every))
    rows: list[tuple[Any, ...]] = []
    while left:
        best = max(every, key=lambda row: len(_covered(row) & left))
        left -= _covered(best)
        rows.append(tuple(x[at] for x, at in zip(values, best, strict=True)))
    return rows


def _covered(row: tuple[int, ...]) -> set[object]:
    """The values and pairs of values of a row."""
    return {*enumerate(row), *itertools.combinations(enumerate(row), 2)}


def pairwise(quick: int | None = None, **values: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test by rows that cover all pairs of values; two parameters give the product.

    Args:
        quick: How many rows `make test` runs; the others are marked `emulator`. None: all.
    """
    rows = rows_of_pairs(list(values.values()))
    return pytest.mark.parametrize(tuple(values), some(rows, rows[:quick]))


def some(
    rows: Sequence[Any],
    quick: Sequence[Any],
    mark: pytest.MarkDecorator = pytest.mark.emulator,
) -> list[Any]:
    """Returns rows of parameters, all of them marked but those that are in `quick`."""
    return [row if row in quick else pytest.param(*_values(row), marks=mark) for row in rows]


def _values(row: Any) -> tuple[Any, ...]:
    return row if isinstance(row, tuple) else (row,)
