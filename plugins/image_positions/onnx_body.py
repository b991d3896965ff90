"""image_positions as an ONNX function: gather, multiply, sum."""

from __future__ import annotations

from collections.abc import Mapping

from thor_dflash.plugins.contract import Attributes
from thor_dflash.plugins.onnx_builder import FunctionBuilder, Inputs


def body(b: FunctionBuilder, x: Inputs, a: Attributes) -> Mapping[str, str]:
    """See the operator's docstring for shapes."""
    del a
    rows = b.op("Gather", x.f32(b, "table"), x["taps"], axis=0)
    weights = b.op("Unsqueeze", x["weights"], b.i64(2))
    y = b.op("ReduceSum", b.op("Mul", rows, weights), b.i64(1), keepdims=0)
    return {"y": b.narrow(y, x.dtype("table"))}
