"""The arithmetic that operators share, as ONNX nodes in float32; numpy_math.py has the same in
numpy.
"""

from __future__ import annotations

import numpy as np

from thor_dflash.core.tensors import DType
from thor_dflash.plugins.numpy_math import E2M1, NVFP4_GROUP, inverse_frequency
from thor_dflash.plugins.onnx_builder import FunctionBuilder, Inputs


def rms_norm(b: FunctionBuilder, x: str, weight: str, eps: float, offset: float) -> str:
    """x / rms(x) * (offset + weight) over the last axis."""
    mean = b.op("ReduceMean", b.op("Mul", x, x), b.i64(-1), keepdims=1)
    root = b.op("Sqrt", b.op("Add", mean, b.f32(eps)))
    return b.op("Mul", b.op("Div", x, root), b.op("Add", weight, b.f32(offset)))


def positions(b: FunctionBuilder, length: str, rows: str) -> str:
    """int64 [T]: length, length + 1, ... for as many rows as `rows` has."""
    count = b.op("Squeeze", b.op("Shape", rows, start=0, end=1))
    steps = b.op("Range", b.scalar(0), count, b.scalar(1))
    return b.op("Add", steps, b.cast(length, DType.I64))


def rope(
    b: FunctionBuilder,
    x: str,
    at: str,
    head_dim: int,
    rotary_dim: int,
    theta: float,
    *,
    by_pair: bool = False,
) -> str:
    """Rotate x [T, heads, D] at positions `at`, integers [T], or [T, rotary_dim / 2] by pair."""
    half = rotary_dim // 2
    frequency = b.const(inverse_frequency(rotary_dim, theta).reshape(1, 1, half))
    row = b.reshape(b.cast(at, DType.F32), -1, 1, half if by_pair else 1)
    angle = b.op("Mul", row, frequency)
    cos, sin = b.op("Cos", angle), b.op("Sin", angle)
    sizes = [half, half] + ([head_dim - rotary_dim] if head_dim > rotary_dim else [])
    first, second, *rest = b.split(x, sizes, axis=2)
    turned = [
        b.op("Sub", b.op("Mul", first, cos), b.op("Mul", second, sin)),
        b.op("Add", b.op("Mul", second, cos), b.op("Mul", first, sin)),
    ]
    return b.concat(2, *turned, *rest)


def dequantise(b: FunctionBuilder, x: Inputs, weight: str, block_scale: str) -> str:
    """A stored weight as float32 [N, K], without row scales."""
    if x.dtype(weight) is not DType.U8:
        return x.f32(b, weight)
    byte = b.cast(x[weight], DType.I32)
    low = b.op("Mod", byte, b.const(np.array(16, np.int32)))
    high = b.op("Div", byte, b.const(np.array(16, np.int32)))
    last = b.i64(-1)
    pairs = b.concat(-1, b.op("Unsqueeze", low, last), b.op("Unsqueeze", high, last))
    values = b.op("Gather", b.const(E2M1), b.reshape(pairs, 0, -1, NVFP4_GROUP), axis=0)
    scale = b.op("Unsqueeze", b.cast(x[block_scale], DType.F32), last)
    return b.reshape(b.op("Mul", values, scale), 0, -1)


def project(
    b: FunctionBuilder, x: Inputs, rows: str, weight: str, block_scale: str, row_scale: str
) -> str:
    """rows float32 [T, K] times one stored weight: float32 [T, N]."""
    wide = b.op("Transpose", dequantise(b, x, weight, block_scale), perm=(1, 0))
    product = b.op("MatMul", rows, wide)
    return b.op("Mul", product, x[row_scale]) if row_scale in x else product


def heads_first(b: FunctionBuilder, x: str, heads: int, head_dim: int) -> str:
    """[T, heads * D] -> [heads, T, D]."""
    return b.op("Transpose", b.reshape(x, 0, heads, head_dim), perm=(1, 0, 2))


def scatter_rows(b: FunctionBuilder, cache: str, rows: str, slots: str, heads: int) -> str:
    """Writes rows [heads, T, D] to cache [heads, N, D] at slots int64 [T] of every head."""
    count = b.op("Shape", slots)
    shape = b.concat(0, b.i64(heads), count, b.i64(1))
    head = b.op("Expand", b.const(np.arange(heads).reshape(-1, 1, 1)), shape)
    slot = b.op("Expand", b.reshape(slots, 1, -1, 1), shape)
    return b.op("ScatterND", cache, b.concat(2, head, slot), rows)
