"""NVFP4 in numpy, byte for byte as modelopt writes it.

Dimensions: N rows (outputs), K columns (inputs), G = K / 16 blocks of a row, each with a scale in
E4M3. Blocks are float32 [16, N, G], so that a sum or maximum over a block adds whole arrays.
All arithmetic is float32, rounded after each operation in the order written here; a product with a
reciprocal in place of a quotient would change bytes.

Source: NVIDIA/Model-Optimizer modelopt/torch/quantization/qtensor/nvfp4_tensor.py. The search of
scales: the same project's `fp8_scale_sweep`; the bound on its candidates: arXiv 2606.07618.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thor_dflash.calib.quantize import fp8
from thor_dflash.core.tensors import DType
from thor_dflash.plugins.numpy_math import NVFP4_GROUP

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

LARGEST = np.float32(6 * 448)
"""Largest E2M1 value times the largest E4M3 value."""
LEAST_AMAX = float(LARGEST * np.finfo(np.float32).tiny)
"""A tensor whose largest magnitude is below this has a second scale that is a subnormal number."""
TINIEST, ONE, TOP = 0x01, 0x38, 0x7E
"""E4M3 bytes: 2^-9, the smallest; 1; 448, the largest."""
E4M3 = np.arange(TOP + 1, dtype=np.uint8).view(DType.FP8.numpy).astype(np.float32)
"""Value of each byte from 0 to TOP. It grows with the byte."""

BOUNDS = tuple(map(np.float32, (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5)))
"""Values halfway between two codes. A tie goes to the even code: up at the second, fourth and sixth
bound, down at the others."""

PLAIN_SEARCH = (-3, 7)
"""Offsets from the rounded scale's byte among which the smallest square error lies."""
WEIGHTED_SEARCH = (-8, 7)
"""The same where the squares have weights. Where these are very uneven, a lower scale may be better
still: one channel counts, and the others saturate."""
LEAST_WEIGHT = np.float32(1e-4)
"""Weight of a channel that the calibration did not see, as a share of the mean."""


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """Rows of a matrix in NVFP4."""

    codes: Bytes
    """[N, K/2], even k in the low nibble."""
    scales: Bytes
    """[N, G], E4M3."""
    flushed: int
    """Blocks that are not zero, but have the smallest scale: their values may be lost."""


def tensor_scale(amax: float) -> np.float32:
    """Return `weight_scale_2` for weights whose largest magnitude is `amax`; 1 for zeros."""
    return np.float32(amax) / LARGEST if amax else np.float32(1)


def as_blocks(rows: Floats) -> Floats:
    """Return the blocks [16, N, G] of rows [N, K]."""
    return np.ascontiguousarray(rows.reshape(len(rows), -1, NVFP4_GROUP).transpose(2, 0, 1))


def rounded_scales(blocks: Floats, scale2: np.float32) -> Bytes:
    """Return the E4M3 bytes [N, G] that put the largest value of each block on code 6."""
    scale = np.abs(blocks).max(axis=0) / (np.float32(6) * scale2)
    scale[scale == 0] = 1
    return fp8.codes(np.clip(scale, E4M3[TINIEST], E4M3[TOP]))


def searched_scales(blocks: Floats, amax: np.float32, weights: Floats | None = None) -> Bytes:
    """Return the E4M3 bytes [N, G] with the smallest sums of squared errors, the lowest of equals.

    amax: the largest magnitude of all weights that share their second scale.
    weights: float32 [16, 1, G], the factors of the squares; None: all 1.
    """
    size = np.abs(blocks)
    start = rounded_scales(blocks, tensor_scale(float(amax))).astype(np.int16)
    start[~size.any(axis=0)] = TINIEST  # all candidates are equal, so the lowest one wins
    best = np.zeros(start.shape, np.uint8)
    least = np.full(start.shape, np.inf, np.float32)
    steps = ((E4M3 / E4M3[TOP]) * amax) / np.float32(6)
    error = np.empty_like(size)
    first, last = PLAIN_SEARCH if weights is None else WEIGHTED_SEARCH
    for offset in range(first, last + 1):
        byte = np.clip(start + offset, TINIEST, TOP).astype(np.uint8)
        np.divide(size, steps[byte], out=error)
        _round_to_codes(error)
        error *= steps[byte]
        np.subtract(size, error, out=error)
        error *= error
        if weights is not None:
            error *= weights
        loss = _sum16(error)
        better = loss < least
        np.copyto(best, byte, where=better)
        np.copyto(least, loss, where=better)
    return best


def channel_weights(energy: Floats) -> Floats:
    """Return the factors [16, 1, G] of a linear's squared errors: E[x^2] of its input channels,
    float32 [K], relative to their mean.
    """
    mean = energy.mean(dtype=np.float64)
    relative = (energy / mean).astype(np.float32) if mean else np.ones_like(energy)
    return as_blocks(np.maximum(relative, LEAST_WEIGHT)[None])


def encode(blocks: Floats, scales: Bytes, scale2: np.float32) -> EncodedRows:
    """Encode blocks with the E4M3 bytes [N, G] as their scales."""
    scaled = blocks / (E4M3[scales] * scale2)
    codes = (scaled < 0).view(np.uint8) << 3  # also where it rounds to 0, but not for -0.0
    np.abs(scaled, out=scaled)
    for i, bound in enumerate(BOUNDS):
        above = np.greater_equal if i % 2 else np.greater
        codes += above(scaled, bound).view(np.uint8)
    pairs = np.bitwise_or(codes[0::2], codes[1::2] << 4, dtype=np.uint8)
    flushed = (scales == TINIEST) & blocks.any(axis=0)
    rows = pairs.transpose(1, 2, 0).reshape(len(scales), -1)
    return EncodedRows(rows, scales, int(flushed.sum()))


def zero_rows(rows: int, columns: int) -> EncodedRows:
    """Encode zeros. For a tensor without any other value modelopt writes NaN."""
    ones = np.full((rows, columns // NVFP4_GROUP), ONE, np.uint8)
    return EncodedRows(np.zeros((rows, columns // 2), np.uint8), ones, 0)


def _round_to_codes(y: Floats) -> None:
    """Round magnitudes to the nearest E2M1 value in place, ties to the even code."""
    power = (y.view(np.uint32) & np.uint32(0x7F80_0000)).view(np.float32)
    step = np.clip(power, np.float32(1), np.float32(4), out=power)  # twice the distance of values
    step *= np.float32(0.5)
    y /= step
    np.rint(y, out=y)
    y *= step
    np.minimum(y, np.float32(6), out=y)


def _sum16(x: Floats) -> Floats:
    """Sum over the first axis in a fixed order, which another device can follow to the same
    bits.
    """
    for half in (8, 4, 2, 1):
        x = x[:half] + x[half:]
    total: Floats = x[0]
    return total
