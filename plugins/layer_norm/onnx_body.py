"""layer_norm as an ONNX function: mean, then variance, then a reshape. Not the standard node: ONNX
Runtime's takes the difference of two sums.
"""

from __future__ import annotations

from collections.abc import Mapping

from thor_dflash.plugins.contract import Attributes
from thor_dflash.plugins.onnx_builder import FunctionBuilder, Inputs


def body(b: FunctionBuilder, x: Inputs, a: Attributes) -> Mapping[str, str]:
    """See the operator's docstring for shapes."""
    rows = x.f32(b, "x")
    centred = b.op("Sub", rows, b.op("ReduceMean", rows, b.i64(-1), keepdims=1))
    variance = b.op("ReduceMean", b.op("Mul", centred, centred), b.i64(-1), keepdims=1)
    root = b.op("Sqrt", b.op("Add", variance, b.f32(a.real("eps"))))
    y = b.op("Mul", b.op("Div", centred, root), x.f32(b, "weight"))
    y = b.op("Add", y, x["bias"])
    fold = a.integer("fold")
    y = b.reshape(y, -1, fold * a.integer("columns")) if fold > 1 else y
    return {"y": b.narrow(y, x.dtype("x"))}
