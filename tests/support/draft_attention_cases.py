"""Cases of draft_attention beyond the operator's own: scores, cuts and attributes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from support.op_cases import OpCase

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins.contract import Attribute
from thor_dflash.plugins.numpy_math import rope

BF16 = DType.BF16.numpy
TILE = 64


def draft_case(
    name: str, rows: int, heads: int, kv: int, slots: int, length: int, **given: Attribute
) -> OpCase:
    """A case of normally distributed numbers without a window. Slots of the rings that hold no
    context row are NaN.
    """
    a: dict[str, Attribute] = {"heads": heads, "kv_heads": kv, "causal": 0, **given}
    dim = int(a.setdefault("head_dim", 16))
    a.setdefault("rotary_dim", dim)
    rng = np.random.default_rng([rows, length])
    x: dict[str, Array] = {
        "q": rng.standard_normal((rows, heads * dim)).astype(BF16),
        "k": rng.standard_normal((rows, kv * dim)).astype(BF16),
        "v": rng.standard_normal((rows, kv * dim)).astype(BF16),
        "q_norm": (1 + rng.standard_normal(dim) / 3).astype(np.float32),
        "k_norm": (1 + rng.standard_normal(dim) / 3).astype(np.float32),
        "length": np.array([length], np.int32),
        "window": np.zeros(1, np.int32),
        "first": np.zeros(1, np.int32),
    }
    live = np.arange(max(length - slots, 0), length) % slots
    for ring in ("ring_k", "ring_v"):
        x[ring] = np.full((kv, slots, dim), np.nan, BF16)
        x[ring][:, live] = rng.standard_normal((kv, len(live), dim)).astype(BF16)
    return OpCase(name, x, a)


def rising(rows: int, length: int) -> OpCase:
    """Keys of every other tile, and hence scores, are 60 times larger. A block that goes through
    several tiles then has to raise the running maximum of its softmax far.
    """
    slots = -(-length // TILE) * TILE
    case = draft_case(f"rising_{rows}_rows", rows, 8, 2, slots, length, causal=1)
    x = dict(case.inputs)
    sizes = np.resize(np.repeat(np.array([1, 60], np.float32), TILE), slots)
    x["ring_k"] = (x["ring_k"].astype(np.float32) * sizes[:, None]).astype(BF16)
    return OpCase(case.name, x, case.attributes)


def far_below_zero(length: int) -> OpCase:
    """Every score lies so far below zero that exp(score) is 0 in float32: keys are nearly opposite
    to the queries. Elements that a rotation turns fast have weight 0, so distance changes little.
    """
    rows, heads, dim, slots = 16, 2, 16, 192
    case = draft_case(f"far_below_zero_at_{length}", rows, heads, 1, slots, length)
    rng = np.random.default_rng(length)
    slow = np.tile(np.arange(dim // 2) >= 3, 2) * np.float32(8)

    def near(count: int, sign: int) -> Array:
        return sign * (1 + rng.standard_normal((count, dim)) / 30)

    ring = rope(near(length, -1)[:, None] * slow, np.arange(length), dim, 1e7)[:, 0]
    keys = np.full((1, slots, dim), np.nan, BF16)
    keys[:, :length] = ring.astype(BF16)
    x = {
        **case.inputs,
        "q": np.tile(near(rows, 1), heads).astype(BF16),
        "k": near(rows, -1).astype(BF16),
        "ring_k": keys,
        "q_norm": slow,
        "k_norm": slow,
    }
    return OpCase(case.name, x, case.attributes)


def draft_cases() -> Iterator[OpCase]:
    """Scores far apart and far below zero, rows of zeros, heads of another width."""
    yield rising(16, 2040)
    yield rising(24, 500)
    yield far_below_zero(0)
    yield far_below_zero(130)
    case = draft_case("zeros_eps_theta", 16, 4, 2, 96, 80, norm_eps=1.0, rope_theta=100.0)
    for name, row in (("q", 3), ("k", 5)):
        case.inputs[name][row] = 0
    yield case
    wide: dict[str, Attribute] = {"head_dim": 256, "rotary_dim": 64}
    yield draft_case("heads_of_256_partly_rotary", 16, 2, 1, 1100, 1088, **wide)
