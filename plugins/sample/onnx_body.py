"""sample as an ONNX function. It computes in int64: ONNX Runtime's Where does not support int32."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from thor_dflash.core.tensors import DType
from thor_dflash.plugins import onnx_noise
from thor_dflash.plugins.accept.onnx_body import fault_rows, masked
from thor_dflash.plugins.contract import Attributes
from thor_dflash.plugins.onnx_builder import FunctionBuilder, Inputs
from thor_dflash.plugins.sample.reference import WEIGHT_BITS

I32, I64, F64 = DType.I32, DType.I64, 11


def body(b: FunctionBuilder, x: Inputs, a: Attributes) -> Mapping[str, str]:
    """See the operator's docstring for shapes."""
    vocab = a.integer("vocab")
    whole = b.take(x["logits"], 0, vocab, 1) if vocab else x["logits"]
    logits = masked(b, x["mask"], whole) if "mask" in x else whole
    rows, z, finite = _ranked(b, x, logits)
    kept = b.op("And", finite, _kept(b, x, z))
    ids = b.op("Gather", b.cast(x["id_map"], I64), rows, axis=0) if "id_map" in x else rows
    score = b.op("Add", z, onnx_noise.noise(b, x["seed"], _positions(b, x, a, logits), ids))
    score = b.op("Where", kept, score, b.f32(-np.inf))
    best = b.op("And", b.op("Equal", score, b.max(score, 1)), kept)
    lowest = b.op("Where", best, ids, b.scalar(np.iinfo(np.int32).max))
    choice = b.op("ReduceMin", lowest, b.i64(1), keepdims=0)
    count = b.op("ReduceSum", b.cast(kept, I64), b.i64(1), keepdims=1)
    at = b.op("Max", b.op("Sub", count, b.scalar(1)), b.scalar(0))
    last = b.op("Squeeze", b.op("GatherElements", rows, at, axis=1), b.i64(1))
    bad = b.op(
        "Or", fault_rows(b, whole), b.op("Squeeze", b.op("Equal", count, b.scalar(0)), b.i64(1))
    )
    choice, last = (b.op("Where", bad, b.scalar(-1), value) for value in (choice, last))
    return {"choice": b.cast(choice, I32), "last": b.cast(last, I32)}


def _ranked(b: FunctionBuilder, x: Inputs, logits: str) -> tuple[str, str, str]:
    """[T, K] of the first K = top_k ranks: stored rows, z, and whether the logit is allowed."""
    width = b.op("Shape", logits, start=1, end=2)
    top_k = b.cast(x["top_k"], I64)
    off = b.op("Equal", top_k, b.scalar(0))
    ranks = b.op("Where", off, width, b.op("Min", top_k, width))
    top, rows = b.ops("TopK", [logits, ranks], 2, axis=1)
    finite = b.op("Greater", top, b.f32(-np.inf))
    away = b.op("Sub", top, b.take(top, 0, 1, 1))
    z = b.op("Mul", away, b.op("Div", b.f32(1.0), x["temperature"]))
    # Not-a-number of a row without a choice must not reach a table's index.
    usable = b.op("And", finite, b.op("Not", b.op("IsNaN", z)))
    return rows, b.op("Where", usable, z, b.f32(-np.inf)), finite


def _kept(b: FunctionBuilder, x: Inputs, z: str) -> str:
    """bool [T, K]: whether a rank may be drawn."""
    weights = b.op("Mul", onnx_noise.exp(b, z), b.f32(2.0**WEIGHT_BITS))
    weights = b.cast(b.op("Round", weights), I64)
    total = b.op("Cast", b.sum(weights, 1), to=F64)
    goal = b.op("Ceil", b.op("Mul", total, b.op("Cast", x["top_p"], to=F64)))
    before = b.op("Sub", b.op("CumSum", weights, b.scalar(1)), weights)
    nucleus = b.op("Less", before, b.op("Max", b.cast(goal, I64), b.scalar(1)))
    nucleus = b.op("Or", nucleus, b.op("GreaterOrEqual", x["top_p"], b.f32(1.0)))
    near = b.op("GreaterOrEqual", z, x["min_log_p"])
    return b.op("And", nucleus, near)


def _positions(b: FunctionBuilder, x: Inputs, a: Attributes, logits: str) -> str:
    """int64 [T, 1]: the absolute position that each row draws for."""
    rows = b.op("Squeeze", b.op("Shape", logits, start=0, end=1))
    steps = b.op("Range", b.scalar(0), rows, b.scalar(1))
    start = b.op("Add", b.cast(x["length"], I64), b.scalar(a.integer("first")))
    return b.reshape(b.op("Add", steps, start), -1, 1)
