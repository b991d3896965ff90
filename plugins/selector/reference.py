"""selector in numpy: the definition that every other implementation is tested against."""

from __future__ import annotations

import numpy as np

from thor_dflash.core.tensors import Array
from thor_dflash.plugins.contract import Arrays, Attributes
from thor_dflash.plugins.numpy_math import wide
from thor_dflash.plugins.numpy_noise import DRAFT, TARGET, noise


def reference(x: Arrays, a: Attributes) -> dict[str, Array]:
    """See the operator's docstring for shapes. Walks row by row."""
    rows, top_k = len(x["logits"]), a.integer("top_k")
    tokens = [int(x["last"][0])]
    found = np.full((rows, top_k), -1, np.int32)
    scores = np.full((rows, top_k), -np.inf, np.float32)
    for row in range(1, rows):
        ids, score = _scored(x, a, row, tokens[-1])
        found[row - 1, : len(ids)] = np.where(np.isfinite(score), ids, -1)
        scores[row - 1, : len(ids)] = np.where(np.isfinite(score), score, -np.inf)
        must = int(x["forced"][row - 1])
        tokens.append(must if must >= 0 else _choice(x, a, row, ids, score))
    out = {"tokens": np.array(tokens, np.int32)}
    return out | ({"candidates": found, "scores": scores} if a.integer("rejection") else {})


def _scored(x: Arrays, a: Attributes, row: int, before: int) -> tuple[Array, Array]:
    """Returns a row's candidates after a token, and their scores, by the temperature if drawn."""
    ids, score = candidates(x, a, row)
    if "hidden" in x:
        edge = wide(x["predecessors"][before]) * wide(x["hidden"][row])
        score = score + wide(x["successors"][ids]) @ edge
    return ids, score / float(x["temperature"][0]) if "seed" in x else score


def _choice(x: Arrays, a: Attributes, row: int, ids: Array, score: Array) -> int:
    if not len(ids):
        return 0
    if "seed" in x:
        low, high = (int(word) for word in x["seed"].view(np.uint32))
        purpose = DRAFT if a.integer("rejection") else TARGET
        score = score + noise(high << 32 | low, x["length"] + row, ids, purpose)
    return int(ids[score.argmax()])


def candidates(x: Arrays, a: Attributes, row: int) -> tuple[Array, Array]:
    """Returns a row's candidates, vocabulary ids int [n], and their own scores, float64 [n]."""
    logits = wide(x["logits"][row, : a.integer("vocab") or None])
    order = np.argsort(-logits, kind="stable")[: a.integer("top_k")]
    order = order[:0] if np.isnan(logits).any() else order[~np.isneginf(logits[order])]
    unary: Array = logits[order] * a.real("multiplier")
    if cap := a.real("softcap"):
        unary = cap * np.tanh(unary / cap)
    return (x["id_map"][order] if "id_map" in x else order), unary
