"""draft_attention in numpy: the definition that every other implementation is tested against."""

from __future__ import annotations

import numpy as np

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins.contract import Arrays, Attributes
from thor_dflash.plugins.numpy_math import rms_norm, rope, rounded, wide


def reference(x: Arrays, a: Attributes) -> dict[str, Array]:
    """See the operator's docstring for shapes. Iterates over positions, not slots."""
    rows, length, window = len(x["q"]), int(x["length"][0]), int(x["window"][0])
    slots = x["ring_k"].shape[1]
    at = length + np.arange(rows)
    dtype = DType.of(x["q"])
    q = wide(rounded(_turned(x["q"], x["q_norm"], at, a, a.integer("heads")), dtype))
    k = wide(rounded(_turned(x["k"], x["k_norm"], at, a, a.integer("kv_heads")), dtype))
    v = wide(x["v"]).reshape(k.shape)
    context = np.arange(max(int(x["first"][0]), length - slots), length)
    ring = [wide(x[f"ring_{n}"])[:, context % slots].swapaxes(0, 1) for n in "kv"]
    keys, values = np.concatenate([ring[0], k]), np.concatenate([ring[1], v])
    where = np.concatenate([context, at])
    distance = at[:, None] - where[None, :]
    seen = np.ones(distance.shape, bool)
    if window:
        seen &= np.abs(distance) < window
    if a.integer("causal"):
        seen &= distance >= 0
    repeat = q.shape[1] // k.shape[1]
    scores = np.einsum("thd,nhd->htn", q, np.repeat(keys, repeat, axis=1)) / np.sqrt(q.shape[2])
    scores = np.where(seen, scores, -np.inf)
    weight = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weight /= weight.sum(axis=-1, keepdims=True)
    o = np.einsum("htn,nhd->thd", weight, np.repeat(values, repeat, axis=1))
    return {"o": rounded(o.reshape(rows, -1), dtype)}


def _turned(x: Array, norm: Array, at: Array, a: Attributes, heads: int) -> Array:
    by_head = wide(x).reshape(len(x), heads, a.integer("head_dim"))
    normed = rms_norm(by_head, wide(norm), a.real("norm_eps"), 0.0)
    return rope(normed, at, a.integer("rotary_dim"), a.real("rope_theta"))
