"""Whether draws have a law."""

from __future__ import annotations

import math

import numpy as np

from thor_dflash.core.tensors import Array


def likely(found: Array, p: Array) -> bool:
    """Whether a chi-square test accepts counts of ids drawn by p; an id of no chance fails it."""
    count = np.bincount(found, minlength=len(p))
    if count[p == 0].any():
        return False
    want = p * len(found)
    rare = want < 5
    pairs = [*zip(count[~rare], want[~rare], strict=True)]
    if rare.any():
        pairs.append((count[rare].sum(), want[rare].sum()))
    pairs = [(c, w) for c, w in pairs if w > 0]
    square = sum((c - w) ** 2 / w for c, w in pairs)
    return bool(square < _quantile(len(pairs) - 1))


def _quantile(degrees: int) -> float:
    """Of chi-square at 1 - 1.3e-5, a chance that no test meets by accident, by Wilson and Hilferty:
    within 1 % from 1 degree of freedom on.
    """
    normal = 4.2
    return degrees * (1 - 2 / (9 * degrees) + normal * math.sqrt(2 / (9 * degrees))) ** 3
