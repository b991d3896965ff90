"""Finds the parts of a linear in every supported format.

    NVFP4, modelopt            weight U8         weight_scale F8_E4M3  weight_scale_2 F32
    NVFP4, compressed-tensors  weight_packed U8  weight_scale F8_E4M3  weight_global_scale F32
    FP8, either                weight F8_E4M3    weight_scale, one in all or one per row
    INT4, a drafter's          see int4_weights.py
    plain                      weight BF16 | F16 | F32

weight_global_scale is a divisor, the other scales are multipliers.

`locate` reads headers only. `load` reads the scales and checks them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thor_dflash.builders.checkpoint.quantized_matrix import Matrix
from thor_dflash.builders.checkpoint.shards import Shards
from thor_dflash.core.errors import CheckpointError
from thor_dflash.core.tensors import Array
from thor_dflash.plugins.numpy_math import NVFP4_GROUP

PLAIN = ("bfloat16", "float16", "float32")

REQUANTISE = (
    "quantise the BF16 checkpoint instead, with Model-Optimizer: "
    "python examples/llm_ptq/hf_ptq.py --pyt_ckpt_path CHECKPOINT --qformat nvfp4 --export_path OUT"
)
"""The way out of FP8 with a scale for each block of 128 x 128, for which there is no kernel."""

ACTIVATION_SCALES = ("input_scale", "input_global_scale")
"""Calibrated activation scales, a multiplier and a divisor. Used only for a prefill with TensorRT's
own products."""

NEGATIVE_OR_NAN = 0x7F
"""E4M3 bytes from this value on are NaN (0x7f, 0xff) or have the sign bit set, which the hardware
ignores in block scales."""


@dataclass(frozen=True, slots=True)
class Linear:
    """The stored names of one linear's parts; "" for an absent part."""

    name: str
    """As in Matrix."""
    codes: str
    block_scale: str
    scale: str
    divides: bool
    """Whether the scale is a divisor."""
    passed_over: tuple[str, ...]
    weight_only: bool = False
    """Whether its rows must not be quantised, even if a scale for them is passed over."""

    @property
    def parts(self) -> set[str]:
        """Names of all stored tensors that belong to this linear."""
        return {self.codes, self.block_scale, self.scale, *self.passed_over} - {""}

    def shape(self, shards: Shards) -> tuple[int, int]:
        """[N, K], the numbers of outputs and inputs."""
        rows, columns = shards.entry(self.codes).shape
        return rows, columns * (2 if self.block_scale else 1)  # a byte holds two NVFP4 codes


def locate(shards: Shards, stem: str, name: str, shape: tuple[int, int]) -> Linear:
    """Find the linear `stem` (its stored name without `.weight`) of `shape` [N, K].

    Raises: CheckpointError if a part is missing, misshapen or in an unsupported format.
    """
    passed_over = tuple(
        f"{stem}.{suffix}" for suffix in ACTIVATION_SCALES if f"{stem}.{suffix}" in shards
    )
    packed = f"{stem}.weight_packed"
    if packed in shards:
        return _nvfp4(shards, name, packed, f"{stem}.weight_global_scale", shape, passed_over)
    weight = f"{stem}.weight"
    if weight not in shards:
        raise CheckpointError(f"{weight} {list(shape)} must be in the checkpoint (got nothing)")
    dtype = shards.entry(weight).dtype.name
    if dtype == "uint8":
        return _nvfp4(shards, name, weight, f"{stem}.weight_scale_2", shape, passed_over)
    _expect(shards, weight, (*PLAIN, "float8_e4m3fn"), [shape])
    if dtype != "float8_e4m3fn":
        return Linear(name, weight, "", "", False, passed_over)
    scale, blocks = f"{stem}.weight_scale", f"{stem}.weight_scale_inv"
    if scale not in shards and blocks in shards:
        raise CheckpointError(
            f"{weight} must have one scale, or one per row; {REQUANTISE} "
            f"(got {blocks} {shards.entry(blocks)})"
        )
    _expect(shards, scale, PLAIN, [(), (1,), (shape[0],), (shape[0], 1)])
    return Linear(name, weight, "", scale, False, passed_over)


def _nvfp4(
    shards: Shards,
    name: str,
    codes: str,
    scale: str,
    shape: tuple[int, int],
    passed_over: tuple[str, ...],
) -> Linear:
    rows, columns = shape
    if columns % NVFP4_GROUP:
        raise CheckpointError(
            f"{codes} must have a multiple of {NVFP4_GROUP} columns, as NVFP4 (got {columns})"
        )
    block_scale = f"{codes.rpartition('.')[0]}.weight_scale"
    _expect(shards, codes, ("uint8",), [(rows, columns // 2)])
    _expect(shards, block_scale, ("float8_e4m3fn",), [(rows, columns // NVFP4_GROUP)])
    _expect(shards, scale, ("float32",), [(), (1,)])
    return Linear(name, codes, block_scale, scale, codes.endswith("_packed"), passed_over)


def _expect(
    shards: Shards, name: str, dtypes: tuple[str, ...], shapes: list[tuple[int, ...]]
) -> None:
    entry = shards.entry(name)
    if entry.dtype.name not in dtypes or entry.shape not in shapes:
        rule = f"{' | '.join(dtypes)} {' | '.join(str(list(shape)) for shape in shapes)}"
        raise CheckpointError(f"{entry.file.name}: {name} must be {rule} (got {entry})")


def load(shards: Shards, linear: Linear) -> Matrix:
    """Load a linear's matrix: codes and block scales memory-mapped, row scales in memory.

    Raises: CheckpointError if a scale is not a positive finite number.
    """
    codes = shards.array(linear.codes)
    block_scale = shards.array(linear.block_scale) if linear.block_scale else None
    if block_scale is not None:
        _check_block_scale(block_scale, shards.placed(linear.block_scale))
    row_scale = _row_scale(shards, linear, codes.shape[0]) if linear.scale else None
    scaled = block_scale is not None and not linear.weight_only
    input_scale = _input_scale(shards, linear) if scaled else None
    return Matrix(linear.name, codes, block_scale, row_scale, input_scale)


def _input_scale(shards: Shards, linear: Linear) -> float | None:
    """Return the first activation scale that is a positive finite number. Bad ones are skipped, not
    refused, because they are optional.
    """
    for name in linear.passed_over:
        scale = shards.array(name).astype(np.float64).reshape(-1)
        if scale.size == 1 and np.isfinite(scale[0]) and scale[0] > 0:
            return float(1 / scale[0] if name.endswith(ACTIVATION_SCALES[1]) else scale[0])
    return None


def _row_scale(shards: Shards, linear: Linear, rows: int) -> NDArray[np.float32]:
    placed = shards.placed(linear.scale)
    scale = positive(shards.array(linear.scale), placed)
    if linear.divides:
        with np.errstate(over="ignore"):  # 1 / subnormal is infinite, which `positive` refuses
            scale = positive(np.float32(1) / scale, f"{placed}, as a divisor,")
    return np.ascontiguousarray(np.broadcast_to(scale.reshape(-1), (rows,)))


def positive(values: Array, name: str) -> NDArray[np.float32]:
    """Convert to float32. Raises CheckpointError unless each value is a positive finite number."""
    scale = values.astype(np.float32)
    bad = scale[~(np.isfinite(scale) & (scale > 0))]
    if bad.size:
        raise CheckpointError(f"{name} must be a positive finite number (got {bad.flat[0]})")
    return scale


def _check_block_scale(block_scale: Array, name: str) -> None:
    bad = np.argwhere(block_scale.view(np.uint8) >= NEGATIVE_OR_NAN)
    if len(bad):
        row, group = bad[0]
        raise CheckpointError(
            f"{name} must hold numbers of at least 0"
            f" (got {float(block_scale[row, group])} at row {row}, group {group})"
        )
