"""verify_attention in numpy: the definition that every other implementation is tested against."""

from __future__ import annotations

import numpy as np

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins.contract import Arrays, Attributes
from thor_dflash.plugins.numpy_math import rms_norm, rope, rounded, wide


def reference(x: Arrays, a: Attributes) -> dict[str, Array]:
    """See the operator's docstring for shapes. One softmax over all visible rows, without tiles."""
    rows, length = len(x["q"]), int(x["length"][0])
    at = length + np.arange(rows)
    dtype = DType.of(x["q"])
    where = _positions(x, a, at)
    q = wide(rounded(normed_and_turned(x["q"], x["q_norm"], where, a, a.integer("heads")), dtype))
    k = normed_and_turned(x["k"], x["k_norm"], where, a, a.integer("kv_heads"))
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


def _positions(x: Arrays, a: Attributes, at: Array) -> Array:
    """The position by which each pair of columns of each row turns, [T] or [T, rotary_dim / 2]."""
    if "at" not in x:
        return at + int(x["shift"][0]) if "shift" in x else at
    by_pair: Array = x["at"][:, mrope_streams(a)]
    return by_pair


def mrope_streams(a: Attributes) -> Array:
    """int64 [rotary_dim / 2]: 0, 1 or 2, which of `at`'s positions turns a pair of columns."""
    pair = np.arange(a.integer("rotary_dim") // 2)
    height = (pair % 3 == 1) & (pair < 3 * a.integer("mrope_height"))
    width = (pair % 3 == 2) & (pair < 3 * a.integer("mrope_width"))
    streams: Array = height * 1 + width * 2
    return streams


def normed_and_turned(x: Array, norm: Array, at: Array, a: Attributes, heads: int) -> Array:
    """Returns rows of keys or queries [T, heads, D] after norm and rotation."""
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
