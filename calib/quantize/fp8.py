"""FP8 linears: E4M3 codes with one scale for the tensor, or one per row.

Sources: NVIDIA/Model-Optimizer (one scale); compressed-tensors, strategy `channel` (one per row).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thor_dflash.core.tensors import DType
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
) -> NDArray[np.uint8]:
    """Return the codes of rows [N, K], uint8, whose quotients are rounded to `dtype` first."""
    quotients = rows / scale
    if dtype == DType.BF16.numpy:
        bits = quotients.view(np.uint32)
        bits += 0x7FFF + (bits >> 16 & 1)  # half of the last bit that is kept; a tie goes to even
        return _table(DType.BF16.numpy)[(bits >> 16).astype(np.uint16)]
    if dtype == np.float16:
        return _table(dtype)[quotients.astype(np.float16).view(np.uint16)]
    return codes(quotients)


def codes(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return the E4M3 codes, rounded to nearest even. A cast by ml_dtypes gives the same, but other
    threads would wait for it.
    """
    bits = values.view(np.uint32)
    # BF16 has more than two bits more than E4M3: rounded to odd first, no number is rounded twice.
    odd = (bits >> 16).astype(np.uint16)
    odd |= (bits & 0xFFFF) != 0
    return _table(DType.BF16.numpy)[odd]


@cache
def _table(dtype: np.dtype[Any]) -> NDArray[np.uint8]:
    """The code of each number of a type of two bytes."""
    with np.errstate(invalid="ignore"):
        numbers = np.arange(1 << 16, dtype=np.uint16).view(dtype)
        return numbers.astype(DType.FP8.numpy).view(np.uint8)
