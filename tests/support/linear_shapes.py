"""Sizes of the products of Qwen3.6-27B and of one of planner-nano, and random weights for tests."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from thor_dflash.core.tensors import Array
from thor_dflash.plugins.linear.layout import WeightKind

BF16 = ml_dtypes.bfloat16
N4 = WeightKind.NVFP4
SHAPES = {
    "in_proj": (5120, (N4, N4, WeightKind.BF16, WeightKind.BF16), (10240, 6144, 48, 48), False),
    "out_proj": (6144, (N4,), (5120,), False),
    "gate_up": (5120, (N4, N4), (17408, 17408), True),
    "down": (17408, (N4,), (5120,), False),
    "qkv": (5120, (N4,) * 4, (6144, 6144, 1024, 1024), False),
    "head": (5120, (N4,), (248320,), False),
    "nano": (320, (N4, N4, WeightKind.BF16, WeightKind.BF16), (1024, 512, 4, 4), False),
}
"""Arguments of linear's `_layout`: K, kind and width of each segment, whether it is a swiglu."""


def nvfp4(rng: np.random.Generator, n: int, k: int) -> dict[str, Array]:
    return {
        "weight": rng.integers(0, 256, (n, k // 2)).astype(np.uint8),
        "block_scale": rng.uniform(0.5, 1, (n, k // 16)).astype(ml_dtypes.float8_e4m3fn),
        "row_scale": rng.uniform(0.01, 0.02, n).astype(np.float32),
    }


def bf16(rng: np.random.Generator, n: int, k: int) -> dict[str, Array]:
    return {"weight": rng.normal(0, 0.1, (n, k)).astype(BF16)}
