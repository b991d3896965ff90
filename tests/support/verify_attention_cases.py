"""Cases of verify_attention beyond the operator's own."""

from __future__ import annotations

import numpy as np
from support.op_cases import OpCase

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins.contract import Attribute
from thor_dflash.plugins.numpy_math import rounded

BF16, FP8 = DType.BF16, DType.FP8


def case_of(
    rows: int, length: int, cache: DType, capacity: int, heads: int = 4, kv: int = 1, **more: int
) -> OpCase:
    """A case of normally distributed numbers; rows of the cache from `length` on are NaN."""
    rng = np.random.default_rng([rows, length])
    x: dict[str, Array] = {
        name: rng.standard_normal((rows, n * 256)).astype(BF16.numpy)
        for name, n in (("q", heads), ("k", kv), ("v", kv))
    }
    x |= {n: rng.standard_normal(256).astype(np.float32) * 0.3 for n in ("q_norm", "k_norm")}
    x["length"] = np.array([length], np.int32)
    for name, scale in (("k", 0.07), ("v", 0.3)):
        scale = scale if cache is FP8 else 1.0
        stored = rounded(rng.standard_normal((kv, capacity, 256)) / scale, cache)
        stored[:, length:] = np.nan
        x[f"cache_{name}"], x[f"scale_{name}"] = stored, np.array([scale], np.float32)
    a: dict[str, Attribute] = {"heads": heads, "kv_heads": kv, **more}
    return OpCase("case", x, a)


def rising(rows: int, length: int, cache: DType, by: float = 60.0) -> OpCase:
    """In every other tile of the cache, keys and hence scores are `by` times larger. A block that
    goes through several tiles then has to raise the running maximum of its softmax and rescale what
    it has summed; with the default `by`, the maximum rises far beyond the slack that is allowed.
    """
    case = case_of(rows, length, cache, -(-(length + rows) // 128) * 128, heads=2)
    x = dict(case.inputs)
    keys: Array = x["cache_k"]
    size = np.array([0.1, 0.1 * by], np.float32).repeat(128 if cache is FP8 else 64)
    sizes = np.resize(size, (keys.shape[1], 1))
    x["cache_k"] = rounded(keys.astype(np.float32) * sizes, cache)
    return OpCase("rising", x, case.attributes)


OWN = 64
"""First of the columns of which each query has one for itself; these are not rotated."""


def scored(rows: int, capacity: int, cache: DType, scores: Array) -> OpCase:
    """A case with chosen scores of the cached keys. All keys and queries are zero except that token
    t and head h have a column of their own, so that no score is another's by accident.

    Args:
        scores: [16, heads, length], exact in FP8. Score of token t % 16 and head h for each cached
            position: nearly base-2 logits, 1.00125 times the number.
    """
    tokens, heads, length = scores.shape
    case = case_of(rows, length, cache, capacity, heads)
    x = dict(case.inputs)
    q = np.zeros((rows, heads, 256))
    for t in range(rows):
        for h in range(heads):
            q[t, h, OWN + t % tokens * heads + h] = 16  # stays 16 when it is normalised
    keys = np.zeros(x["cache_k"].shape, np.float32)
    keys[0, :length, OWN : OWN + tokens * heads] = scores.reshape(-1, length).T
    keys[:, length:] = np.nan
    x["q"], x["cache_k"] = q.reshape(rows, -1).astype(BF16.numpy), rounded(keys, cache)
    x["scale_k"] = np.array([1.00125 * np.log(2)], np.float32)
    x["q_norm"] = np.zeros(256, BF16.numpy)
    x["k_norm"] = x["k_norm"].astype(BF16.numpy)
    return OpCase(f"{rows}_rows_scored_{cache.value}", x, case.attributes)


ALONE = tuple((8 * h + 3 * h + i + 1, i) for h in range(2) for i in range(3))
"""Token and head (of three) of the row that rises alone in each later tile: every head, with a
token below 8 and one above."""


def alone(rows: int, cache: DType) -> OpCase:
    """In each later tile of 128 positions, one row of each three heads (ALONE) has a score that f16
    weights could not hold if its base did not move. No other row of these heads needs to move its
    base there: all rise by less than the slack in tile 3, and one in tile 1 by hardly more.
    """
    rng = np.random.default_rng(5)
    scores = rng.integers(-2, 3, (16, 6, 128 * (len(ALONE) + 1))).astype(np.float32)
    scores[:, :, 3 * 128 + 100] = 6
    for n, (token, head) in enumerate(ALONE, 1):
        scores[token, [head, head + 3], 128 * n + 64 + 9 * n] = 24
    scores[5, 1::3] = -8
    scores[5, 1::3, ::64] = 0
    scores[5, 1::3, 128 + 100] = 8
    length = scores.shape[2]
    case = scored(rows, length + 128, cache, scores)
    return OpCase(f"{rows}_rows_that_rise_alone_{cache.value}", case.inputs, case.attributes)


def without_risers(case: OpCase) -> tuple[OpCase, Array]:
    """A case of `alone` in which none of ALONE rises, and which of its rows [T, 6] are others."""
    q = case.inputs["q"].copy().reshape(-1, 6, 256)
    others = np.ones(q.shape[:2], bool)
    for token, head in ALONE:
        others[token::16, [head, head + 3]] = False
    q[~others] = 0
    return OpCase(case.name, {**case.inputs, "q": q.reshape(len(q), -1)}, case.attributes), others


def strongest_last(cache: DType) -> OpCase:
    """A full cache of as many pieces as a row can have. In some rows the last piece has weights too
    large for the base of any other, in some the first.
    """
    scores = np.zeros((16, 2, 4208), np.float32)
    scores[::2, :, 4150], scores[1::4, :, 20] = 192, 192
    case = scored(16, 4224, cache, scores)
    return OpCase(f"strongest_last_{cache.value}", case.inputs, case.attributes)


def between_numbers() -> OpCase:
    """Two keys have the same score with a query that is rounded to bf16 and different scores with
    one that is not.
    """
    scores = np.zeros((1, 2, 20), np.float32)
    case = scored(1, 128, FP8, scores)
    x = dict(case.inputs)
    q, keys = np.zeros((1, 2, 256), BF16.numpy), np.zeros((1, 128, 256), np.float32)
    q[:, :, OWN : OWN + 2] = 16  # normalised: 11.3137, or 11.3125 in bf16
    keys[0, 3, OWN] = keys[0, 9, OWN + 1] = 256
    x["q_norm"][OWN + 1] = 0.002  # normalised: 11.3363
    keys[:, 20:] = np.nan
    x["q"], x["cache_k"] = q.reshape(1, -1), rounded(keys, FP8)
    return OpCase("queries_between_two_numbers", x, case.attributes)
