"""head as an ONNX function."""

from __future__ import annotations

from collections.abc import Mapping

from thor_dflash.core.tensors import DType
from thor_dflash.plugins import onnx_math
from thor_dflash.plugins.contract import Attributes
from thor_dflash.plugins.onnx_builder import FunctionBuilder, Inputs


def body(b: FunctionBuilder, x: Inputs, a: Attributes) -> Mapping[str, str]:
    """See the operator's docstring for shapes."""
    rows = onnx_math.rms_norm(
        b, x.f32(b, "x"), x.f32(b, "norm_weight"), a.real("norm_eps"), a.real("norm_offset")
    )
    rows = b.round(rows, x.dtype("x"))
    logits = onnx_math.project(b, x, rows, "weight0", "block_scale0", "row_scale0")
    vocab = a.integer("vocab")
    chosen = b.take(logits, 0, vocab, 1) if vocab else logits
    best = b.op("ArgMax", chosen, axis=1, keepdims=0)
    if "id_map" in x:
        best = b.op("Gather", b.cast(x["id_map"], DType.I64), best, axis=0)
    # Not by a sum, which is also NaN for infinities of both signs.
    odd = b.op("ReduceMax", b.cast(b.op("IsNaN", chosen), DType.I32), b.i64(1), keepdims=0)
    best = b.op("Where", b.cast(odd, DType.BOOL), b.scalar(-1), best)
    return {"logits": logits, "best": b.cast(best, DType.I32)}
