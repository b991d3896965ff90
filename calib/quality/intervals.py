"""Intervals of the figures: bootstrap over documents, and the exact test of paired successes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from thor_dflash.calib.quality.divergence import Floats

SAMPLES = 2000
"""Bootstrap samples."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float


def ratio_of_sums(numerators: Sequence[float], denominators: Sequence[float]) -> Interval | None:
    """The sum of some over the sum of others, an entry of both for each document; None where the
    second sum is 0. Documents are drawn with replacement, the same ones in every call.
    """
    a, b = np.asarray(numerators, np.float64), np.asarray(denominators, np.float64)
    return _interval(a, b, np.ones_like(a), np.ones_like(b))


def ratio_of_ratios(
    a: Sequence[float], b: Sequence[float], c: Sequence[float], d: Sequence[float]
) -> Interval | None:
    """(sum a / sum b) / (sum c / sum d), paired: an entry of each for each document."""
    return _interval(*(np.asarray(x, np.float64) for x in (a, b, c, d)))


def _interval(a: Floats, b: Floats, c: Floats, d: Floats) -> Interval | None:
    if not len(a) or not b.sum() or not c.sum() or not d.sum():
        return None
    value = a.sum() / b.sum() / (c.sum() / d.sum())
    draws = np.random.default_rng(0).multinomial(len(a), np.full(len(a), 1 / len(a)), SAMPLES)
    sums = [draws @ x for x in (a, b, c, d)]
    with np.errstate(divide="ignore", invalid="ignore"):
        found = sums[0] / sums[1] / (sums[2] / sums[3])
    low, high = np.quantile(found[np.isfinite(found)], (0.025, 0.975))
    return Interval(float(value), float(low), float(high))


def share(successes: int, of: int) -> Interval:
    """A share with Wilson's interval."""
    z, p = 1.96, successes / of
    centre, wide = p + z * z / (2 * of), z * math.sqrt((p * (1 - p) + z * z / (4 * of)) / of)
    scale = 1 + z * z / of
    return Interval(p, (centre - wide) / scale, (centre + wide) / scale)


def paired_p(only_first: int, only_second: int) -> float:
    """Two-sided p of the exact McNemar test: successes of one of two that the other one missed."""
    n, k = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(n, i) for i in range(k + 1)) / 2**n
    return float(min(1.0, 2 * tail))
