"""sample in numpy: the definition that every other implementation is tested against."""

from __future__ import annotations

import numpy as np

from thor_dflash.core.tensors import Array
from thor_dflash.plugins.contract import Arrays, Attributes
from thor_dflash.plugins.numpy_noise import ACCEPT, RESIDUAL, exp, log, noise, uniform, words

WEIGHT_BITS = 31
"""Weights of top-p are multiples of 2^-31 of the largest."""
LAW_BITS = 44
"""Weights of rejection are multiples of 2^-44 of the largest: those of 2^18 ids fit an int64."""


def reference(x: Arrays, a: Attributes) -> dict[str, Array]:
    """See the operator's docstring for shapes. Draws row by row."""
    drawn = [_draw(x, a, i) for i in range(len(x["logits"]))]
    choice, last = np.array(drawn, np.int32).T
    return {"choice": choice, "last": last}


def processed(x: Arrays, a: Attributes, i: int) -> tuple[Array, Array]:
    """Returns what row i draws from: stored rows by rank, and their float32 z. Empty at a fault."""
    whole = x["logits"][i, : a.integer("vocab") or None]
    if np.isnan(whole).any() or np.isposinf(whole).any():
        return np.zeros(0, np.int64), np.zeros(0, np.float32)
    allowed = whole
    if "mask" in x:
        ids = np.arange(len(whole))
        bits = x["mask"][i].view(np.uint32)[ids // 32] >> (ids % 32).astype(np.uint32)
        allowed = np.where(bits & 1, whole, np.float32(-np.inf))
    rows = np.argsort(-allowed, kind="stable")[: np.isfinite(allowed).sum()]
    ranked = allowed[rows]
    with np.errstate(over="ignore"):
        z = (ranked - ranked[:1]) * (np.float32(1) / x["temperature"][0])
    keep = _kept(z, int(x["top_k"][0]), x["top_p"][0], x["min_log_p"][0])
    return rows[:keep], z[:keep]


def _kept(z: Array, top_k: int, top_p: np.float32, min_log_p: np.float32) -> int:
    """The number of first ranks that may be drawn."""
    keep = min(top_k, len(z)) if top_k else len(z)
    if top_p < 1 and keep:
        weights = np.rint(exp(z[:keep]) * np.float32(2**WEIGHT_BITS)).astype(np.int64)
        goal = np.ceil(np.float64(top_p) * np.float64(weights.sum())).astype(np.int64)
        keep = int((np.cumsum(weights) - weights < max(goal, 1)).sum())
    return min(keep, int((z >= min_log_p).sum()))


def _draw(x: Arrays, a: Attributes, i: int) -> tuple[int, int]:
    rows, z = processed(x, a, i)
    if not len(rows):
        return -1, -1
    ids = x["id_map"][rows] if "id_map" in x else rows
    low, high = (int(word) for word in x["seed"].view(np.uint32))
    seed, position = high << 32 | low, np.array(int(x["length"][0]) + a.integer("first") + i)
    last = int(rows[-1])
    if "drawn" in x and i < int(x["drawn"][0]):
        draft, used = int(x["tokens"][i + 1]), x["candidates"][i] >= 0
        candidates, scores = x["candidates"][i][used], x["scores"][i][used]
        if draft in candidates:
            return reject(ids, z, candidates, draft_law(scores), draft, seed, position), last
    return largest(ids, z + noise(seed, position, ids)), last


def largest(ids: Array, score: Array) -> int:
    """Returns the id of the largest score, the lowest among equals."""
    return int(ids[score == score.max()].min())


def weights(z: Array) -> Array:
    """Returns the integer weights of rejection, int64."""
    return np.rint(exp(z) * np.float32(2**LAW_BITS)).astype(np.int64)


def draft_law(scores: Array) -> Array:
    """Returns the probabilities q of the candidates that have these scores, float64."""
    w = weights(scores - scores.max())
    return np.asarray(w.astype(np.float64) / np.float64(w.sum()))


def reject(
    ids: Array, z: Array, candidates: Array, law: Array, draft: int, seed: int, position: Array
) -> int:
    """Returns the choice of a row with ids that are left and their z, whose draft was drawn from
    the candidates by their law.
    """
    w = weights(z)
    total, w = np.float64(w.sum()), w.astype(np.float64)
    q = ((candidates == ids[:, None]) * law).sum(axis=1)
    u = uniform(words(seed, position, np.array(0), ACCEPT))
    if (u * law[candidates == draft].sum()) * total < w[ids == draft].sum():
        return draft
    rest = w - q * total
    left = (q == 0) | (rest > 0)
    apart = log(np.where(rest > 0, rest * 2.0**-LAW_BITS, 1.0).astype(np.float32))
    score = np.where(q == 0, z, apart) + noise(seed, position, ids, RESIDUAL)
    return largest(ids[left], score[left]) if left.any() else draft
