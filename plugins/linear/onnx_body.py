"""linear as an ONNX function: dequantise, then multiply."""

from __future__ import annotations

from collections.abc import Mapping

from thor_dflash.plugins import onnx_math
from thor_dflash.plugins.contract import Attributes
from thor_dflash.plugins.onnx_builder import FunctionBuilder, Inputs

GELU = {"gelu_tanh": "tanh", "gelu_erf": "none"}
"""Epilogue -> how the standard node approximates."""


def body(b: FunctionBuilder, x: Inputs, a: Attributes) -> Mapping[str, str]:
    """See the operator's docstring for shapes."""
    dtype = x.dtype("x")
    rows = b.round(prologue(b, x, a), dtype)
    y = [_segment(b, x, rows, i) for i in range(a.integer("segments"))]
    if a.word("epilogue") == "swiglu":
        y = [b.op("Mul", b.silu(y[0]), y[1])]
    elif a.word("epilogue") == "residual":
        y = [b.op("Add", x.f32(b, "residual"), y[0])]
    elif a.word("epilogue") in GELU:
        y = [b.op("Gelu", one, approximate=GELU[a.word("epilogue")]) for one in y]
    return {f"y{i}": b.narrow(value, dtype) for i, value in enumerate(y)}


def _segment(b: FunctionBuilder, x: Inputs, rows: str, i: int) -> str:
    y = onnx_math.project(b, x, rows, f"weight{i}", f"block_scale{i}", f"row_scale{i}")
    return b.op("Add", y, x[f"bias{i}"]) if f"bias{i}" in x else y


def prologue(b: FunctionBuilder, x: Inputs, a: Attributes) -> str:
    """Returns the rows after norm and gate, float32."""
    rows = x.f32(b, "x")
    if "norm_weight" in x:
        width = a.integer("head_dim")
        eps, offset = a.real("norm_eps"), a.real("norm_offset")
        by_head = b.reshape(rows, 0, -1, width) if width else rows
        normed = onnx_math.rms_norm(b, by_head, x.f32(b, "norm_weight"), eps, offset)
        rows = b.reshape(normed, 0, -1) if width else normed
    if a.word("gate") == "sigmoid":
        rows = b.op("Mul", rows, b.op("Sigmoid", x.f32(b, "gate")))
    elif a.word("gate") == "silu":
        rows = b.op("Mul", rows, b.silu(x.f32(b, "gate")))
    return rows
