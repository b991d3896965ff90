"""draft_attention in numpy: the definition that every other implementation is tested against."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins.contract import Arrays, Attribute, Attributes, OpCase
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


LENGTHS = (0, 1, 8, 23, 24, 25, 47, 48, 49, 200, 200_000)
VIEWS = {(1, 24): LENGTHS, (0, 0): LENGTHS, (1, 0): LENGTHS, (0, 24): LENGTHS, (0, 7): (200,)}
"""(causal, window) -> lengths. The last window hides even rows of the block from one another."""


def _stale(x: Arrays, first: int, length: int) -> dict[str, Array]:
    """Returns the inputs with NaN in every ring slot except those of positions from `first` on."""
    out = dict(x)
    for name in ("ring_k", "ring_v"):
        slots = out[name].shape[1]
        kept = np.arange(first, length) % slots
        ring = np.full_like(out[name], np.nan)
        ring[:, kept] = out[name][:, kept]
        out[name] = ring
    return out


def cases(rng: np.random.Generator) -> Iterator[OpCase]:
    """Context empty, below, at and above the window and the ring; both causalities; bf16 rows."""
    heads, kv, dim, slots = 4, 2, 16, 48

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(np.float32)

    for dtype in (DType.F32, DType.BF16):
        for (causal, window), lengths in VIEWS.items():
            for length in lengths if dtype is DType.F32 else (30,):
                x: dict[str, Array] = {
                    "q": normal(16, heads * dim),
                    "k": normal(16, kv * dim),
                    "v": normal(16, kv * dim),
                    "ring_k": normal(kv, slots, dim),
                    "ring_v": normal(kv, slots, dim),
                }
                x = {name: value.astype(dtype.numpy) for name, value in x.items()} | {
                    "q_norm": 1 + normal(dim) / 3,
                    "k_norm": 1 + normal(dim) / 3,
                    "length": np.array([length], np.int32),
                    "window": np.array([window], np.int32),
                    "first": np.zeros(1, np.int32),
                }
                a: dict[str, Attribute] = {
                    "heads": heads,
                    "kv_heads": kv,
                    "head_dim": dim,
                    "rotary_dim": dim,
                    "causal": causal,
                }
                name = f"causal_{causal}_window_{window}_at_{length}_{dtype.value}"
                yield OpCase(name, x, a)
                if length in (25, 49, 200):
                    for first in (length - 5, length, length + 3):
                        late = {"first": np.array([first], np.int32)}
                        yield OpCase(f"{name}_from_{first}", _stale(x, first, length) | late, a)
