"""image_attention in numpy: the definition that every other implementation is tested against."""

from __future__ import annotations

import numpy as np

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins.contract import Arrays, Attributes
from thor_dflash.plugins.numpy_math import inverse_frequency, rounded, wide


def reference(x: Arrays, a: Attributes) -> dict[str, Array]:
    """See the operator's docstring for shapes."""
    heads, dim, dtype = a.integer("heads"), a.integer("head_dim"), DType.of(x["qkv"])
    count = int(x["count"][0])
    qkv = wide(x["qkv"][:count]).reshape(count, 3, heads, dim)
    angle = angles(x["row"][:count], x["column"][:count], dim, a.real("rope_theta"))
    q, k = (wide(rounded(_turned(qkv[:, i], wide(angle)), dtype)) for i in (0, 1))
    scores = np.einsum("thd,nhd->htn", q, k) / np.sqrt(dim)
    weight = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weight /= weight.sum(axis=-1, keepdims=True)
    o = np.zeros((len(x["qkv"]), heads * dim))
    o[:count] = np.einsum("htn,nhd->thd", weight, qkv[:, 2]).reshape(count, -1)
    return {"o": rounded(o, dtype)}


def angles(row: Array, column: Array, dim: int, theta: float) -> Array:
    """float32 [P, dim / 2]: first the row's angles, then the column's."""
    frequency = inverse_frequency(dim // 2, theta)
    by_axis = [at.astype(np.float32)[:, None] * frequency for at in (row, column)]
    return np.concatenate(by_axis, axis=1)


def _turned(x: Array, angle: Array) -> Array:
    """x [P, heads, D] turned by angle [P, D / 2]; pairs are split halves."""
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    first, second = np.split(x, 2, axis=2)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=2)
