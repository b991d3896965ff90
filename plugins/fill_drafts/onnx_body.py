"""fill_drafts as an ONNX function: the places of the drafts, between those before and behind."""

from __future__ import annotations

from collections.abc import Mapping

from thor_dflash.core.tensors import DType
from thor_dflash.plugins.contract import Attributes
from thor_dflash.plugins.onnx_builder import FunctionBuilder, Inputs


def body(b: FunctionBuilder, x: Inputs, a: Attributes) -> Mapping[str, str]:
    """See the operator's docstring for shapes."""
    # In int64: ONNX Runtime's Where does not support int32.
    ids, best = (b.cast(x[name], DType.I64) for name in ("ids", "best"))
    at = a.integer("at")
    start, end = b.i64(at), b.op("Add", b.op("Shape", best), b.i64(at))
    places = b.slice(ids, start, end, 0)
    best = b.op("Max", best, b.scalar(0))
    places = b.op("Where", b.op("Less", places, b.scalar(0)), best, places)
    before, behind = b.take(ids, 0, at, 0), b.slice(ids, end, b.op("Shape", ids), 0)
    tokens = b.cast(b.concat(0, before, places, behind), DType.I32)
    return {"tokens": tokens, "first": b.take(tokens, at, at + 1, 0)}
