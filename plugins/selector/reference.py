"""selector in numpy: the definition that every other implementation is tested against."""

from __future__ import annotations

import numpy as np

from thor_dflash.core.tensors import Array
from thor_dflash.plugins.contract import Arrays, Attributes
from thor_dflash.plugins.numpy_math import wide
from thor_dflash.plugins.numpy_noise import noise


def reference(x: Arrays, a: Attributes) -> dict[str, Array]:
    """See the operator's docstring for shapes. Walks row by row."""
    tokens = [int(x["last"][0])]
    for row in range(1, len(x["logits"])):
        must = int(x["forced"][row - 1])
        tokens.append(must if must >= 0 else _choice(x, a, row, tokens[-1]))
    return {"tokens": np.array(tokens, np.int32)}


def _choice(x: Arrays, a: Attributes, row: int, before: int) -> int:
    ids, unary = candidates(x, a, row)
    if not len(ids):
        return 0
    edge = wide(x["predecessors"][before]) * wide(x["hidden"][row])
    score = unary + wide(x["successors"][ids]) @ edge
    if "seed" in x:
        low, high = (int(word) for word in x["seed"].view(np.uint32))
        drawn = noise(high << 32 | low, x["length"] + row, ids)
        score = score / float(x["temperature"][0]) + drawn
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
