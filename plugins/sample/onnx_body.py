"""sample as an ONNX function. It computes in int64: ONNX Runtime's Where does not support int32."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from thor_dflash.core.tensors import DType
from thor_dflash.plugins import onnx_noise
from thor_dflash.plugins.accept.onnx_body import fault_rows, masked
from thor_dflash.plugins.contract import Attributes
from thor_dflash.plugins.numpy_noise import ACCEPT, RESIDUAL
from thor_dflash.plugins.onnx_builder import FunctionBuilder, Inputs
from thor_dflash.plugins.sample.reference import LAW_BITS, WEIGHT_BITS

I32, I64, F64 = DType.I32, DType.I64, 11
NO_ID = np.iinfo(np.int32).max


def body(b: FunctionBuilder, x: Inputs, a: Attributes) -> Mapping[str, str]:
    """See the operator's docstring for shapes."""
    vocab = a.integer("vocab")
    whole = b.take(x["logits"], 0, vocab, 1) if vocab else x["logits"]
    logits = masked(b, x["mask"], whole) if "mask" in x else whole
    rows, z, finite = _ranked(b, x, logits)
    kept = b.op("And", finite, _kept(b, x, z))
    ids = b.op("Gather", b.cast(x["id_map"], I64), rows, axis=0) if "id_map" in x else rows
    at = _positions(b, x, a, logits)
    choice = _largest(b, b.op("Add", z, onnx_noise.noise(b, x["seed"], at, ids)), kept, ids)
    if "drawn" in x:
        choice = _rejecting(b, x, (ids, z, kept), at, choice)
    choice = b.op("Squeeze", choice, b.i64(1))
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
    z = b.op("Mul", away, onnx_noise.inverse(b, x["temperature"]))
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


def _largest(b: FunctionBuilder, score: str, among: str, ids: str) -> str:
    """int64 [T, 1]: the id of the largest score among some, the lowest of equals; else NO_ID."""
    score = b.op("Where", among, score, b.f32(-np.inf))
    best = b.op("And", b.op("Equal", score, b.max(score, 1)), among)
    lowest = b.op("Where", best, ids, b.scalar(NO_ID))
    return b.op("ReduceMin", lowest, b.i64(1), keepdims=1)


def _weights(b: FunctionBuilder, z: str, among: str) -> tuple[str, str]:
    """float64: the integer weights of rejection, 0 elsewhere, and their sum over the last axis."""
    weight = b.op("Mul", onnx_noise.exp(b, z), b.f32(2.0**LAW_BITS))
    weight = b.op("Where", among, b.cast(b.op("Round", weight), I64), b.scalar(0))
    return b.op("Cast", weight, to=F64), b.op("Cast", b.sum(weight, 1), to=F64)


def _rejecting(
    b: FunctionBuilder, x: Inputs, ranked: tuple[str, str, str], at: str, plain: str
) -> str:
    """int64 [T, 1]: the choices, `plain` where no draft was drawn."""
    ids, z, kept = ranked
    candidates, scores = b.cast(x["candidates"], I64), x["scores"]
    used = b.op("GreaterOrEqual", candidates, b.scalar(0))
    scores = b.op("Where", used, scores, b.f32(-np.inf))
    away = b.op("Where", used, b.op("Sub", scores, b.max(scores, 1)), b.f32(0.0))
    mine, all_mine = _weights(b, away, used)
    law = b.op("Div", mine, b.op("Max", all_mine, _f64(b, 1.0)))
    rows = b.op("Shape", x["tokens"], start=0, end=1)
    draft = b.concat(0, b.take(b.cast(x["tokens"], I64), 1, np.iinfo(np.int32).max, 0), b.i64(-1))
    draft = b.op("Unsqueeze", draft, b.i64(1))
    row = b.op("Range", b.scalar(0), b.op("Squeeze", rows), b.scalar(1))
    there = b.op("And", b.op("Equal", candidates, draft), used)
    drawn = b.op("Less", b.reshape(row, -1, 1), b.cast(x["drawn"], I64))
    drawn = b.op("And", drawn, b.cast(b.max(b.cast(there, I64), 1), DType.BOOL))

    q = _by_id(b, ids, candidates, used, law)
    weight, total = _weights(b, z, kept)
    u = b.op("Cast", onnx_noise.words(b, x["seed"], at, b.scalar(0), ACCEPT), to=F64)
    u = b.op("Mul", b.op("Add", u, _f64(b, 0.5)), _f64(b, 2.0**-32))
    own, of_draft = (
        b.sum(b.op("Where", mask, value, _f64(b, 0.0)), 1)
        for mask, value in ((there, law), (b.op("Equal", ids, draft), weight))
    )
    accepted = b.op("Less", b.op("Mul", b.op("Mul", u, own), total), of_draft)
    rest = b.op("Sub", weight, b.op("Mul", q, total))
    more, free = (b.op("Greater", rest, _f64(b, 0.0)), b.op("Equal", q, _f64(b, 0.0)))
    rest = b.op("Where", more, b.op("Mul", rest, _f64(b, 2.0**-LAW_BITS)), _f64(b, 1.0))
    score = b.op("Where", free, z, onnx_noise.log(b, b.cast(rest, DType.F32)))
    score = b.op("Add", score, onnx_noise.noise(b, x["seed"], at, ids, RESIDUAL))
    left = b.op("And", kept, b.op("Or", free, more))
    other = _largest(b, score, left, ids)
    accepted = b.op("Or", accepted, b.op("Equal", other, b.scalar(NO_ID)))
    return b.op("Where", drawn, b.op("Where", accepted, draft, other), plain)


def _by_id(b: FunctionBuilder, ids: str, candidates: str, used: str, law: str) -> str:
    """float64 [T, ranks]: the law of each rank's id, 0 if it is no candidate."""
    most = b.op(
        "Max", b.op("ReduceMax", ids, keepdims=0), b.op("ReduceMax", candidates, keepdims=0)
    )
    unused = b.op("Add", most, b.scalar(1))  # the place of unused candidates
    shape = b.concat(
        0, b.op("Shape", ids, start=0, end=1), b.reshape(b.op("Add", unused, b.scalar(1)), 1)
    )
    every = b.op("Expand", _f64(b, 0.0), shape)
    places = b.op("Where", used, candidates, unused)
    every = b.op("ScatterElements", every, places, law, axis=1)
    return b.op("GatherElements", every, ids, axis=1)


def _f64(b: FunctionBuilder, value: float) -> str:
    return b.const(np.array(value, np.float64))


def _positions(b: FunctionBuilder, x: Inputs, a: Attributes, logits: str) -> str:
    """int64 [T, 1]: the absolute position that each row draws for."""
    rows = b.op("Squeeze", b.op("Shape", logits, start=0, end=1))
    steps = b.op("Range", b.scalar(0), rows, b.scalar(1))
    start = b.op("Add", b.cast(x["length"], I64), b.scalar(a.integer("first")))
    return b.reshape(b.op("Add", steps, start), -1, 1)
