"""The arithmetic that operators share, in numpy float64: the reference for all bodies and
kernels.
"""

from __future__ import annotations

import math

import numpy as np

from thor_dflash.core.tensors import Array, DType

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The 16 FP4 values by code; the sign is bit 3."""

NVFP4_GROUP = 16
"""Columns that share one block scale."""

FP8_MAX = 448.0
"""Largest finite E4M3 value."""


def wide(x: Array) -> Array:
    """Convert to float64."""
    return np.asarray(x, np.float64)


def rounded(x: Array, dtype: DType) -> Array:
    """Round to an element type, to nearest even; FP8 saturates."""
    if dtype is DType.FP8:
        x = np.clip(x, -FP8_MAX, FP8_MAX)
    return x.astype(np.float32).astype(dtype.numpy)


def sigmoid(x: Array) -> Array:
    """Logistic function, numerically stable for either sign."""
    small = np.exp(-np.abs(x))
    return np.asarray(np.where(x >= 0, 1, small) / (1 + small))


def silu(x: Array) -> Array:
    """x * sigmoid(x)."""
    return x * sigmoid(x)


def gelu_tanh(x: Array) -> Array:
    """x * Phi(x), Phi approximated by a tanh. Source: Hendrycks and Gimpel 2016."""
    inner = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    return np.asarray(0.5 * x * (1 + np.tanh(inner)))


def gelu_erf(x: Array) -> Array:
    """x * Phi(x), Phi the normal distribution."""
    flat: list[float] = x.reshape(-1).tolist()
    phi = [0.5 * math.erfc(-value / math.sqrt(2)) for value in flat]
    return np.asarray(x * np.reshape(phi, x.shape))


def rms_norm(x: Array, weight: Array, eps: float, offset: float) -> Array:
    """x / rms(x) * (offset + weight) over the last axis; Qwen3.5, zero-centred, has offset 1."""
    root: Array = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return x / root * (offset + weight)


def rope(x: Array, positions: Array, rotary_dim: int, theta: float) -> Array:
    """Rotate the first `rotary_dim` columns of the last axis; pairs are split halves, as in NeoX.

    x [T, heads, D], positions [T], or [T, rotary_dim / 2] by pair. Frequencies and angles are
    rounded to float32, as transformers and every engine here compute them: at 10^5 positions that
    rounding is visible.
    """
    half = rotary_dim // 2
    frequency = inverse_frequency(rotary_dim, theta)
    pairs = 1 if positions.ndim == 1 else half
    by_pair = positions.astype(np.float32).reshape(len(positions), 1, pairs)
    angle = (by_pair * frequency).astype(np.float64)
    first, second, rest = x[..., :half], x[..., half:rotary_dim], x[..., rotary_dim:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def inverse_frequency(rotary_dim: int, theta: float) -> Array:
    """float32 [rotary_dim / 2]: theta^(-2j / rotary_dim)."""
    exponent = np.arange(0, rotary_dim, 2).astype(np.float32) / np.float32(rotary_dim)
    return (1.0 / np.power(np.float64(theta), exponent.astype(np.float64))).astype(np.float32)


def dequantise(weight: Array, block_scale: Array | None) -> Array:
    """Returns a stored weight as float64 [N, K], without row scales.

    A weight uint8 [N, K/2] holds two E2M1 codes per byte, even k in the low nibble, and needs
    block_scale float8_e4m3fn [N, K/16]. Source: modelopt NVFP4QTensor.
    """
    if weight.dtype != np.uint8:
        return wide(weight)
    assert block_scale is not None
    codes = np.stack([weight & 15, weight >> 4], axis=-1).reshape(weight.shape[0], -1)
    scale: Array = np.repeat(wide(block_scale), NVFP4_GROUP, axis=1)
    return wide(E2M1[codes]) * scale
