"""Four-bit integers with a scale for each group of a row (W4A16), as compressed-tensors packs them.

    weight_packed  I32 [N, K/8]            eight codes to a word, the first in the lowest bits
    weight_scale   BF16 | F16 | F32 [N, G]  one for each of G groups of K/G columns
    weight_shape   I64 [2]                 N, K

A code c stands for c - 8. No kernel has scales along K, so a drafter's weights are converted: FP8
with one scale per row. Of random normal weights in groups of 128, four bits are off by 11.1 % (root
mean square), these by 11.4 %. Drafts may change, answers cannot. A target is refused: its answers
would change.

Source: compressed-tensors compressors/pack_quantized.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thor_dflash.builders.checkpoint.quantized_matrix import Matrix
from thor_dflash.builders.checkpoint.shards import Shards
from thor_dflash.core.errors import CheckpointError
from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins.numpy_math import FP8_MAX

CODES_IN_WORD = 8
SCALES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class Int4Linear:
    """The stored name of one linear, without `.weight_packed` and so on."""

    name: str
    """As in Matrix."""
    stem: str

    @property
    def parts(self) -> set[str]:
        """Names of all stored tensors that belong to this linear."""
        return {f"{self.stem}.weight_{part}" for part in ("packed", "scale", "shape")}


def is_int4(shards: Shards, stem: str) -> bool:
    """Whether a linear is stored so."""
    packed = f"{stem}.weight_packed"
    return packed in shards and shards.entry(packed).dtype == np.int32


def locate_int4(shards: Shards, stem: str, name: str, shape: tuple[int, int]) -> Int4Linear:
    """Find the linear `stem` of `shape` [N, K].

    Raises: CheckpointError if a part is missing or misshapen.
    """
    rows, columns = shape
    packed, scale, sizes = (f"{stem}.weight_{part}" for part in ("packed", "scale", "shape"))
    if (got := shards.entry(packed)).shape != (rows, -(-columns // CODES_IN_WORD)):
        rule = f"int32 [{rows}, {-(-columns // CODES_IN_WORD)}], 4-bit codes"
        raise CheckpointError(f"{packed} must be {rule} (got {got})")
    got = shards.entry(scale)
    groups = got.shape[1] if len(got.shape) == 2 else 0
    if got.dtype.name not in SCALES or got.shape != (rows, groups) or columns % max(groups, 1):
        rule = f"{' | '.join(SCALES)} [{rows}, groups of {columns} columns]"
        raise CheckpointError(f"{scale} must be {rule} (got {got})")
    if tuple(shards.array(sizes).tolist()) != shape:
        raise CheckpointError(f"{sizes} must be {list(shape)} (got {shards.array(sizes).tolist()})")
    return Int4Linear(name, stem)


def load_int4(shards: Shards, linear: Int4Linear) -> Matrix:
    """Load a linear's matrix, converted to FP8 with one scale per row, in memory.

    Raises: CheckpointError if a scale is not a positive finite number.
    """
    name = f"{linear.stem}.weight_scale"
    scale = shards.array(name).astype(np.float32)
    bad = scale[~(np.isfinite(scale) & (scale > 0))]
    if bad.size:
        placed = shards.placed(name)
        raise CheckpointError(f"{placed} must be a positive finite number (got {bad.flat[0]})")
    columns = int(shards.array(f"{linear.stem}.weight_shape")[1])
    codes, row_scale = _as_fp8(shards.array(f"{linear.stem}.weight_packed"), scale, columns)
    return Matrix(linear.name, codes, None, row_scale)


def unpack(words: NDArray[np.int32], columns: int) -> NDArray[np.int8]:
    """Return int8 [N, K], -8 to 7, from packed int32 [N, K/8]."""
    pairs = np.ascontiguousarray(words).view(np.uint8)  # little-endian: the first codes come first
    codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(len(words), -1)
    return codes[:, :columns].astype(np.int8) - np.int8(8)


def _as_fp8(
    words: NDArray[np.int32], scale: NDArray[np.float32], columns: int
) -> tuple[Array, NDArray[np.float32]]:
    values = unpack(words, columns).reshape(*scale.shape, -1).astype(np.float32)
    values *= scale[:, :, None]
    values = values.reshape(len(words), columns)
    row_scale = np.abs(values).max(axis=1) / np.float32(FP8_MAX)
    row_scale[row_scale == 0] = 1
    values /= row_scale[:, None]
    return values.astype(DType.FP8.numpy), row_scale
