"""FP8 linears: E4M3 codes with one scale for the tensor, or one per row.

Sources: NVIDIA/Model-Optimizer (one scale); compressed-tensors, strategy `channel` (one per row).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins.numpy_math import FP8_MAX


def tensor_scale(amax: float) -> np.float32:
    """Return the scale of a tensor whose largest magnitude is `amax`; 1 for zeros."""
    return np.float32(amax / FP8_MAX) if amax else np.float32(1)


def row_scales(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the scale of each row of [N, K]: float32 [N, 1]; 1 for zeros."""
    scale: NDArray[np.float32] = np.abs(rows).max(axis=1, keepdims=True) / np.float32(FP8_MAX)
    scale[scale == 0] = 1
    return scale


def encode(
    rows: NDArray[np.float32], scale: np.float32 | NDArray[np.float32], dtype: np.dtype[Any]
) -> Array:
    """Return the codes of rows [N, K], whose quotients are rounded to `dtype` first."""
    quotients = (rows / scale).astype(dtype)
    if dtype.itemsize == 2:
        return _table(dtype)[quotients.view(np.uint16)]
    return quotients.astype(DType.FP8.numpy)


@cache
def _table(dtype: np.dtype[Any]) -> Array:
    """The code of each number of a type of two bytes: faster than to convert each."""
    with np.errstate(invalid="ignore"):
        return np.arange(1 << 16, dtype=np.uint16).view(dtype).astype(DType.FP8.numpy)
