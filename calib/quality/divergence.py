"""How far a candidate's distribution of the next token is from the reference's, row by row.

Dimensions: n rows, V ids that may be chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thor_dflash.core.errors import ModelFault
from thor_dflash.core.tensors import Array

Floats = NDArray[np.float64]

SURE = 1.0
"""Margin of the reference's best id beyond which another choice is no near tie, nats."""


@dataclass(frozen=True, slots=True)
class RowDivergence:
    """Measures of n rows, [n] each."""

    kl: Floats
    """KL(reference || candidate), nats."""
    reference_nll: Floats
    """Minus the log probability of the token that follows, nats."""
    nll: Floats
    same: NDArray[np.bool_]
    """Whether the best id is the same."""
    sure: NDArray[np.bool_]
    """Whether the reference's best id is ahead of its second by more than SURE."""


def compare_rows(reference: Array, candidate: Array, following: Sequence[int]) -> RowDivergence:
    """Compare logits [n, V] of the same rows, in float64; `following` are the n tokens that the
    text has next.

    Raises:
        ModelFault: a logit is NaN or infinite.
    """
    p, q = _log_softmax(reference), _log_softmax(candidate)
    rows, ids = np.arange(len(p)), np.asarray(following)
    second, first = np.partition(p, -2)[:, -2:].T
    # Equal logits give the lowest id, as accept chooses.
    same = p.argmax(1) == q.argmax(1)
    kl = (np.exp(p) * (p - q)).sum(1)
    return RowDivergence(
        np.maximum(kl, 0.0),  # rounding can make it -1e-17
        -p[rows, ids],
        -q[rows, ids],
        same,
        first - second > SURE,
    )


def join(parts: Sequence[RowDivergence]) -> RowDivergence:
    """The rows of all parts, in order."""
    return RowDivergence(
        np.concatenate([part.kl for part in parts]),
        np.concatenate([part.reference_nll for part in parts]),
        np.concatenate([part.nll for part in parts]),
        np.concatenate([part.same for part in parts]),
        np.concatenate([part.sure for part in parts]),
    )


def best(logits: Array, count: int) -> list[tuple[int, float]]:
    """The most probable ids of one row [V] with their probabilities, the best first."""
    p = _log_softmax(logits[None])[0]
    order = np.argsort(-p, kind="stable")[:count]
    return [(int(i), float(np.exp(p[i]))) for i in order]


def _log_softmax(logits: Array) -> Floats:
    x = logits.astype(np.float64)
    if not np.isfinite(x).all():
        row = int(np.flatnonzero(~np.isfinite(x).all(1))[0])
        raise ModelFault(f"logits must be finite (got {x[row][~np.isfinite(x[row])][0]})")
    x -= x.max(1, keepdims=True)
    x -= np.log(np.exp(x).sum(1, keepdims=True))
    return x
