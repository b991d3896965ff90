"""selector as an ONNX function: one TopK for all rows, then the walk, unrolled."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from thor_dflash.core.tensors import DType
from thor_dflash.plugins import onnx_math, onnx_noise
from thor_dflash.plugins.contract import Attributes
from thor_dflash.plugins.numpy_noise import DRAFT, TARGET
from thor_dflash.plugins.onnx_builder import FunctionBuilder, Inputs


def body(b: FunctionBuilder, x: Inputs, a: Attributes) -> Mapping[str, str]:
    """See the operator's docstring for shapes."""
    ids, unary, none = _candidates(b, x, a)
    forced, rows = b.cast(x["forced"], DType.I64), a.integer("rows")
    token = b.cast(x["last"], DType.I64)
    hidden = x.f32(b, "hidden") if "hidden" in x else ""
    drawn = _noise(b, x, a, ids) if "seed" in x else ""
    tokens, scores = [token], list[str]()
    for row in range(1, rows):
        of_row = _row(b, ids, row)
        score = _row(b, unary, row)
        if hidden:
            score = b.op("Add", score, _edges(b, x, token, _row(b, hidden, row), of_row))
        if drawn:
            score = b.op("Mul", score, onnx_noise.inverse(b, x["temperature"]))
            scores.append(score)
            score = b.op("Add", score, _row(b, drawn, row))
        # Minus infinity plus a number stays behind every candidate.
        best = b.op("ArgMax", score, axis=1, keepdims=0)
        choice = b.reshape(b.op("Gather", of_row, best, axis=1), 1)
        choice = b.op("Where", _row(b, none, row), b.i64(0), choice)
        must = _row(b, forced, row - 1)
        token = b.op("Where", b.op("Less", must, b.i64(0)), choice, must)
        tokens.append(token)
    made = {"tokens": b.cast(b.concat(0, *tokens), DType.I32)}
    return made | (_law(b, a, ids, none, scores) if a.integer("rejection") else {})


def _noise(b: FunctionBuilder, x: Inputs, a: Attributes, ids: str) -> str:
    at = b.reshape(onnx_math.positions(b, x["length"], x["logits"]), -1, 1)
    purpose = DRAFT if a.integer("rejection") else TARGET
    return onnx_noise.noise(b, x["seed"], at, ids, purpose)


def _edges(b: FunctionBuilder, x: Inputs, before: str, hidden: str, ids: str) -> str:
    """float32 [1, K]: the scores of candidates after the token before them."""
    edge = b.op("Mul", _rows(b, x, "predecessors", before), hidden)
    codes = _rows(b, x, "successors", b.reshape(ids, -1))
    return b.op("MatMul", edge, b.op("Transpose", codes, perm=(1, 0)))


def _law(
    b: FunctionBuilder, a: Attributes, ids: str, none: str, scores: list[str]
) -> dict[str, str]:
    """candidates and scores [R, K], those of the draft that follows each row."""
    rows, most = a.integer("rows"), a.integer("top_k")
    lost = b.op("Unsqueeze", b.take(none, 1, rows, 0), b.i64(1))
    score = b.concat(0, *scores)
    lost = b.op("Or", lost, b.op("Or", b.op("IsNaN", score), b.op("IsInf", score)))
    ids = b.cast(b.op("Where", lost, b.scalar(-1), b.take(ids, 1, rows, 0)), DType.I32)
    score = b.op("Where", lost, b.f32(-np.inf), score)
    spare = b.op("Sub", b.i64(most), b.op("Shape", score, start=1, end=2))
    pads = b.concat(0, b.i64(0, 0, 1), spare)
    return {
        "candidates": b.op("Pad", ids, pads, b.const(np.array(-1, np.int32))),
        "scores": b.op("Pad", score, pads, b.f32(-np.inf)),
    }


def _candidates(b: FunctionBuilder, x: Inputs, a: Attributes) -> tuple[str, str, str]:
    """Returns ids int64 [R, K], scores float32 [R, K], and whether a row has none, bool [R]."""
    vocab = a.integer("vocab")
    logits = b.take(x["logits"], 0, vocab, 1) if vocab else x["logits"]
    odd = b.op("ReduceMax", b.cast(b.op("IsNaN", logits), DType.I32), b.i64(1), keepdims=0)
    count = b.op("Min", b.i64(a.integer("top_k")), b.op("Shape", logits, start=1, end=2))
    value, ids = b.ops("TopK", (logits, count), 2, axis=1)
    if "id_map" in x:
        ids = b.op("Gather", b.cast(x["id_map"], DType.I64), ids, axis=0)
    lowest = b.f32(-np.inf)
    empty = b.op("Equal", b.op("ReduceMax", value, b.i64(1), keepdims=0), lowest)
    none = b.op("Or", b.cast(odd, DType.BOOL), empty)
    unary = b.op("Mul", value, b.f32(a.real("multiplier")))
    if cap := a.real("softcap"):
        bounded = b.op("Mul", b.op("Tanh", b.op("Div", unary, b.f32(cap))), b.f32(cap))
        # tanh would make a candidate of minus infinity.
        unary = b.op("Where", b.op("Equal", value, lowest), lowest, bounded)
    return ids, unary, none


def _row(b: FunctionBuilder, x: str, row: int) -> str:
    return b.take(x, row, row + 1, 0)


def _rows(b: FunctionBuilder, x: Inputs, name: str, ids: str) -> str:
    rows = b.op("Gather", x[name], ids, axis=0)
    return rows if x.dtype(name) is DType.F32 else b.cast(rows, DType.F32)
