"""verify_attention in numpy: the definition that every other implementation is tested against."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins.contract import Arrays, Attribute, Attributes, OpCase
from thor_dflash.plugins.numpy_math import rms_norm, rope, rounded, wide


def reference(x: Arrays, a: Attributes) -> dict[str, Array]:
    """See the operator's docstring for shapes. One softmax over all visible rows, without tiles."""
    rows, length = len(x["q"]), int(x["length"][0])
    at = length + np.arange(rows)
    dtype = DType.of(x["q"])
    q = wide(rounded(_turned(x["q"], x["q_norm"], at, a, a.integer("heads")), dtype))
    k = _turned(x["k"], x["k_norm"], at, a, a.integer("kv_heads"))
    v = wide(x["v"]).reshape(k.shape)
    out: dict[str, Array] = {}
    stored: dict[str, Array] = {}
    for name, fresh in (("k", k), ("v", v)):
        cache, scale = x[f"cache_{name}"].copy(), wide(x[f"scale_{name}"])
        fresh = rounded(fresh / scale, DType.of(cache)).swapaxes(0, 1)
        cache[:, length : length + rows] = fresh
        out[f"next_cache_{name}"] = cache
        stored[name] = wide(cache[:, : length + rows]) * scale
    return {"o": rounded(attend(q, stored["k"], stored["v"], at), dtype)} | out


def _turned(x: Array, norm: Array, at: Array, a: Attributes, heads: int) -> Array:
    by_head = wide(x).reshape(len(x), heads, a.integer("head_dim"))
    normed = rms_norm(by_head, wide(norm), a.real("norm_eps"), a.real("norm_offset"))
    return rope(normed, at, a.integer("rotary_dim"), a.real("rope_theta"))


def attend(q: Array, k: Array, v: Array, at: Array) -> Array:
    """Causal softmax attention: q [T, Hq, D] at positions `at` [T], k and v [Hkv, N, D] ->
    [T, Hq * D].
    """
    k, v = (np.repeat(u, q.shape[1] // u.shape[0], axis=0) for u in (k, v))
    scores = np.einsum("thd,hnd->htn", q, k) / np.sqrt(q.shape[2])
    where = np.arange(k.shape[1], dtype=np.int64)
    seen = np.less_equal(where, at[:, None])
    scores = np.where(seen, scores, -np.inf)
    weight = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weight /= weight.sum(axis=-1, keepdims=True)
    mixed: Array = np.einsum("htn,hnd->thd", weight, v)
    return mixed.reshape(len(q), -1)


CAPACITY = 160
"""Cache rows of each case: five tiles."""


def _case(
    rng: np.random.Generator,
    rows: int,
    length: int,
    cache: DType,
    attributes: dict[str, Attribute],
    dtype: DType = DType.F32,
) -> OpCase:
    a = {"heads": 4, "kv_heads": 2, "head_dim": 16, "rotary_dim": 8, "tile": 32} | attributes
    heads, kv, dim = int(a["heads"]), int(a["kv_heads"]), int(a["head_dim"])

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(np.float32)

    x: dict[str, Array] = {
        "q": normal(rows, heads * dim),
        "k": normal(rows, kv * dim),
        "v": normal(rows, kv * dim),
    }
    x = {name: value.astype(dtype.numpy) for name, value in x.items()} | {
        "q_norm": normal(dim) * 0.3,
        "k_norm": normal(dim) * 0.3,
        "length": np.array([length], np.int32),
    }
    for name, scale in (("k", 0.05), ("v", 0.125)):
        stored = rounded(normal(kv, CAPACITY, dim) / (scale if cache is DType.FP8 else 1), cache)
        # Rows past the length must never be read: NaN reveals it if they are.
        stored[:, length:] = np.nan
        x[f"cache_{name}"] = stored
        x[f"scale_{name}"] = np.array([scale if cache is DType.FP8 else 1], np.float32)
    return OpCase(f"{rows}_rows_at_{length}_{heads}x{kv}_{cache.value}_{dtype.value}", x, a)


def cases(rng: np.random.Generator) -> Iterator[OpCase]:
    """Empty and full cache; lengths around tile boundaries; group sizes 1 to 6; each cache type."""
    for length in (0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 100, 128):
        yield _case(rng, 16, length, DType.F32, {})
    yield _case(rng, 1, 40, DType.F32, {})
    yield _case(rng, 48, 40, DType.F32, {})
    for heads, kv in ((2, 2), (6, 1), (12, 2)):
        yield _case(rng, 16, 50, DType.F32, {"heads": heads, "kv_heads": kv})
    yield _case(rng, 16, 70, DType.F32, {"rotary_dim": 16})
    for length in (0, 31, 90):
        yield _case(rng, 16, length, DType.FP8, {})
    yield _case(rng, 16, 31, DType.BF16, {}, DType.BF16)
    yield _case(rng, 16, 31, DType.FP8, {}, DType.BF16)
    yield _case(rng, 16, CAPACITY - 16, DType.F32, {})
