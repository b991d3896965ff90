"""Cases of verify_attention beyond the room's own."""

from __future__ import annotations

import numpy as np

from thor_dflash.plugins.numerics import rounded
from thor_dflash.plugins.op import Attribute, Case
from thor_dflash.tensors import Array, DType

BF16, FP8 = DType.BF16, DType.FP8


def case_of(
    rows: int, length: int, cache: DType, capacity: int, heads: int = 4, kv: int = 1, **more: int
) -> Case:
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
    return Case("case", x, a)


def rising(rows: int, length: int, cache: DType, by: float = 60.0) -> Case:
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
    return Case("rising", x, case.attributes)
