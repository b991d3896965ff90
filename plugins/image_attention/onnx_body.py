"""image_attention as an ONNX function: one softmax per head, head by head to bound the memory."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from thor_dflash.core.tensors import DType
from thor_dflash.plugins.contract import Attributes
from thor_dflash.plugins.numpy_math import inverse_frequency
from thor_dflash.plugins.onnx_builder import FunctionBuilder, Inputs


def body(b: FunctionBuilder, x: Inputs, a: Attributes) -> Mapping[str, str]:
    """See the operator's docstring for shapes."""
    heads, dim, dtype = a.integer("heads"), a.integer("head_dim"), x.dtype("qkv")
    by_head = b.reshape(x.f32(b, "qkv"), 0, 3, heads, dim)
    q, k, v = b.split(b.op("Transpose", by_head, perm=(1, 2, 0, 3)), (1, 1, 1), axis=0)
    cos, sin = _rotation(b, x, a)
    q, k = (b.round(_turned(b, one, cos, sin), dtype) for one in (q, k))
    count = b.op("Shape", x["qkv"], start=0, end=1)
    steps = b.op("Range", b.scalar(0), b.op("Squeeze", count), b.scalar(1))
    there = b.op("Less", steps, b.cast(x["count"], DType.I64))
    column = b.reshape(there, -1, 1)
    # Padding may hold NaN, and NaN times a zero weight is NaN.
    q, k, v = (
        b.op("Where", column, b.reshape(one, heads, -1, dim), b.f32(0.0)) for one in (q, k, v)
    )
    q = b.op("Mul", q, b.f32(dim**-0.5))

    def step(s: FunctionBuilder, value: tuple[str, ...]) -> tuple[list[str], list[str]]:
        own_q, own_k, own_v = (s.op("Gather", one, value[0], axis=0) for one in (q, k, v))
        scores = s.op("MatMul", own_q, s.op("Transpose", own_k, perm=(1, 0)))
        scores = s.op("Where", there, scores, s.f32(-np.inf))
        return [], [s.op("MatMul", s.op("Softmax", scores, axis=-1), own_v)]

    [o] = b.loop(b.scalar(heads), [], [DType.F32], step)
    o = b.op("Where", column, o, b.f32(0.0))
    o = b.reshape(b.op("Transpose", o, perm=(1, 0, 2)), 0, heads * dim)
    return {"o": b.narrow(o, dtype)}


def _rotation(b: FunctionBuilder, x: Inputs, a: Attributes) -> tuple[str, str]:
    """Cosines and sines [P, D / 2]."""
    frequency = inverse_frequency(a.integer("head_dim") // 2, a.real("rope_theta"))
    turns = [
        b.op("Mul", b.reshape(b.cast(x[axis], DType.F32), -1, 1), b.const(frequency[None]))
        for axis in ("row", "column")
    ]
    angle = b.concat(1, *turns)
    return b.op("Cos", angle), b.op("Sin", angle)


def _turned(b: FunctionBuilder, one: str, cos: str, sin: str) -> str:
    """[1, heads, P, D], turned."""
    first, second = b.ops("Split", [one], 2, axis=3, num_outputs=2)
    return b.concat(
        3,
        b.op("Sub", b.op("Mul", first, cos), b.op("Mul", second, sin)),
        b.op("Add", b.op("Mul", second, cos), b.op("Mul", first, sin)),
    )
