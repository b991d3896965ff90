"""accept as an ONNX function. It computes in int64: ONNX Runtime's Where does not support int32."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins.accept.record import LOG_MARGIN
from thor_dflash.plugins.contract import Attributes
from thor_dflash.plugins.onnx_builder import ONNX_TYPE, FunctionBuilder, Inputs

I32, I64 = DType.I32, DType.I64
_INTEGERS = (
    "tokens",
    "forced",
    "drafted",
    "cap",
    "stop",
    "rule",
    "top_k",
    "close",
    "strict",
    "soft",
)
_Ints = Mapping[str, str]


def body(b: FunctionBuilder, x: Inputs, a: Attributes) -> Mapping[str, str]:
    """See the operator's docstring for shapes."""
    rows, vocab = a.integer("rows"), a.integer("vocab")
    n = {name: b.cast(x[name], I64) for name in _INTEGERS}
    whole = b.take(x["logits"], 0, vocab, 1) if vocab else x["logits"]
    logits = masked(b, x["mask"], whole) if "mask" in x else whole
    best = _choice(b, n, whole, logits, b.cast(x["sampled"], I64) if "sampled" in x else "")
    choice = _softened(b, n, x["soft_margin"], logits, best)
    follow = b.take(n["tokens"], 1, rows, 0)
    chosen = b.take(choice, 0, rows - 1, 0)
    # A draft of -1, as a broken drafter makes it, must not agree with the -1 that a fault chooses.
    sound = b.op("GreaterOrEqual", chosen, _int(b, 0))
    same = b.op("And", b.op("Equal", follow, chosen), sound)
    relaxed = b.branch(
        b.op("Greater", b.op("Squeeze", n["rule"]), _int(b, 0)),
        lambda s: _relaxed(s, x, n, (logits, best, choice, follow)),
        lambda s: s.cast(s.const(np.zeros(rows - 1, np.bool_)), I64),
        I64,
    )
    agree = b.op("Max", b.cast(same, I64), relaxed)
    agreed = b.op("Min", _leading(b, agree), n["drafted"])
    row = b.const(np.arange(rows, dtype=np.int64))
    padded = b.concat(0, follow, b.const(np.array([-1], np.int64)))
    tokens = b.op("Where", b.op("Less", row, agreed), padded, choice)
    count = b.op("Min", b.op("Add", agreed, _int(b, 1, 1)), n["cap"])
    count = b.op("Min", count, _stopped(b, n, tokens, rows))
    last = b.op("Gather", choice, b.op("Sub", count, _int(b, 1, 1)), axis=0)
    fault = b.op(
        "Where",
        b.op("Less", last, _int(b, 0, 1)),
        b.op("Sub", count, _int(b, 1, 1)),
        _int(b, -1, 1),
    )
    loose, softened = (
        _differ(b, pair, b.op("Less", row, count)) for pair in ((tokens, choice), (best, choice))
    )
    words = b.concat(0, count, fault, loose, agreed, softened, tokens, choice)
    return {"record": b.cast(words, I32)}


def _int(b: FunctionBuilder, value: int, *shape: int) -> str:
    return b.const(np.full(shape, value, np.int64))


def _uint(value: int | Array) -> Array:
    return np.asarray(value, np.uint32)


def masked(b: FunctionBuilder, mask: str, logits: str) -> str:
    """logits, minus infinity where the bit mask [R, W] forbids the id."""
    ids = b.op(
        "Range", b.scalar(0), b.op("Squeeze", b.op("Shape", logits, start=1, end=2)), b.scalar(1)
    )
    unsigned = 12
    word = b.op("Gather", mask, b.op("Div", ids, b.scalar(32)), axis=1)
    shift = b.op("Cast", b.op("Mod", ids, b.scalar(32)), to=unsigned)
    shifted = b.op("BitShift", b.op("Cast", word, to=unsigned), shift, direction="RIGHT")
    bit = b.op("BitwiseAnd", shifted, b.const(_uint(1)))
    return b.op("Where", b.op("Cast", bit, to=9), logits, b.f32(-np.inf))


def _choice(b: FunctionBuilder, n: _Ints, whole: str, logits: str, sampled: str) -> str:
    """int64 [R]: the forced id, else the sampled or the best id; -1 at a fault."""
    best = sampled or b.op("ArgMax", logits, axis=1, keepdims=0)
    top = b.op("ReduceMax", logits, b.i64(1), keepdims=0)
    best = b.op("Where", b.op("IsInf", top), _int(b, -1), best)
    forced = b.op("Where", b.op("GreaterOrEqual", n["forced"], _int(b, 0)), n["forced"], best)
    return b.op("Where", fault_rows(b, whole), _int(b, -1), forced)


def fault_rows(b: FunctionBuilder, logits: str) -> str:
    """bool [R]: whether a row has NaN or positive infinity."""
    nan = b.op("Cast", b.op("IsNaN", logits), to=ONNX_TYPE[I64])
    high = b.op("Cast", b.op("IsInf", logits, detect_negative=0), to=ONNX_TYPE[I64])
    bad = b.op("ReduceMax", b.op("Max", nan, high), b.i64(1), keepdims=0)
    return b.op("Greater", bad, _int(b, 0))


def _softened(b: FunctionBuilder, n: _Ints, margin: str, logits: str, best: str) -> str:
    """int64 [R]: the soft id if it is near enough to an unforced choice, else the choice."""
    width = b.op("Squeeze", b.op("Shape", logits, start=1, end=2))
    soft = n["soft"]
    inside = b.op("And", b.op("GreaterOrEqual", soft, b.scalar(0)), b.op("Less", soft, width))
    safe = b.op("Unsqueeze", b.op("Where", inside, soft, b.scalar(0)), b.i64(1))
    mine = b.op("Squeeze", b.op("GatherElements", logits, safe, axis=1), b.i64(1))
    top = b.op("ReduceMax", logits, b.i64(1), keepdims=0)
    near = b.op(
        "And",
        _within(b, mine, top, margin),
        b.op("Greater", mine, b.f32(-np.inf)),
    )
    free = b.op(
        "And", b.op("Less", n["forced"], _int(b, 0)), b.op("GreaterOrEqual", best, _int(b, 0))
    )
    return b.op("Where", b.op("And", b.op("And", inside, near), free), soft, best)


def _within(b: FunctionBuilder, mine: str, top: str, margin: str) -> str:
    """bool: mine >= top - margin, in float64, since float32 would round the difference."""
    mine, top, margin = (b.op("Cast", x, to=11) for x in (mine, top, margin))
    return b.op("GreaterOrEqual", mine, b.op("Sub", top, margin))


def _differ(b: FunctionBuilder, pair: tuple[str, str], among: str) -> str:
    """int64 [1]: number of rows, among those of the mask `among`, where two vectors differ."""
    differ = b.op("And", b.op("Not", b.op("Equal", *pair)), among)
    return b.op("ReduceSum", b.cast(differ, I64), b.i64(0), keepdims=1)


def _leading(b: FunctionBuilder, agree: str) -> str:
    """int64 [1]: number of ones before the first zero."""
    misses = b.op("CumSum", b.op("Sub", _int(b, 1), agree), b.scalar(0))
    clean = b.cast(b.op("Equal", misses, _int(b, 0)), I64)
    return b.op("ReduceSum", clean, b.i64(0), keepdims=1)


def _stopped(b: FunctionBuilder, n: _Ints, tokens: str, rows: int) -> str:
    """int64 [1]: number of rows up to and including the first stop token; R + 1 without one."""
    hit = _any_of(b, tokens, n["stop"])
    order = b.const(np.arange(1, rows + 1, dtype=np.int64))
    return b.op("ReduceMin", b.op("Where", hit, order, _int(b, rows + 1)), b.i64(0), keepdims=1)


def _any_of(b: FunctionBuilder, tokens: str, ids: str) -> str:
    """bool: whether each token is one of `ids`. -1 is no id."""
    token = b.reshape(tokens, -1, 1)
    equal = b.op(
        "And",
        b.op("Equal", token, b.reshape(ids, 1, -1)),
        b.op("GreaterOrEqual", token, _int(b, 0)),
    )
    return b.op("Cast", b.op("ReduceMax", b.cast(equal, I64), b.i64(1), keepdims=0), to=9)


def _relaxed(b: FunctionBuilder, x: Inputs, n: _Ints, block: tuple[str, str, str, str]) -> str:
    """int64 [R - 1]: 1 if the draft passes the relaxed rule.

    `block` is (logits, best, choice, follow).
    """
    logits, best, choice, forced = (b.take(v, 0, -1, 0) for v in (*block[:3], n["forced"]))
    follow = block[3]
    width = b.op("Squeeze", b.op("Shape", logits, start=1, end=2))
    ids = b.op("Range", b.scalar(0), width, b.scalar(1))
    draft = b.reshape(follow, -1, 1)
    inside = b.op("And", b.op("GreaterOrEqual", draft, b.scalar(0)), b.op("Less", draft, width))
    safe = b.op("Where", inside, draft, b.scalar(0))
    mine = b.op("GatherElements", logits, safe, axis=1)
    ids = b.reshape(ids, 1, -1)
    ahead = _ahead(b, logits, ids, mine, draft)
    rank = b.op("ReduceSum", b.cast(ahead, I64), b.i64(1), keepdims=1)
    near = _near(b, x, n["rule"], logits, mine)
    if "last" in x:
        last = b.reshape(b.take(b.cast(x["last"], I64), 0, -1, 0), -1, 1)
        least = b.op("GatherElements", logits, b.op("Max", last, b.scalar(0)), axis=1)
        kept = b.op("Not", _ahead(b, least, last, logits, ids))
        near = _near(b, x, n["rule"], b.op("Where", kept, logits, b.f32(-np.inf)), mine)
        inside = b.op("And", inside, b.op("Not", _ahead(b, least, last, mine, draft)))
    unforced = b.op("Less", forced, _int(b, 0))
    never = b.op("Or", _any_of(b, follow, n["strict"]), _any_of(b, follow, n["stop"]))
    ok = b.op("And", b.op("Less", rank, n["top_k"]), b.op("And", near, inside))
    ok = b.op("And", ok, b.op("Greater", mine, b.f32(-np.inf)))
    ok = b.op("And", b.op("Squeeze", ok, b.i64(1)), b.op("And", unforced, b.op("Not", never)))
    ok = b.op("And", ok, b.op("GreaterOrEqual", choice, _int(b, 0)))
    ok = b.op("And", ok, b.op("Equal", choice, best))
    return b.cast(b.op("And", ok, _before_close(b, n["close"], follow)), I64)


def _ahead(b: FunctionBuilder, logit: str, id_: str, of_logit: str, of_id: str) -> str:
    """bool: whether the rank of an id is before that of another."""
    tie = b.op("And", b.op("Equal", logit, of_logit), b.op("Less", id_, of_id))
    return b.op("Or", b.op("Greater", logit, of_logit), tie)


def _near(b: FunctionBuilder, x: Inputs, rule: str, logits: str, mine: str) -> str:
    """bool [R - 1, 1]: whether the draft is within the margin of the best id, by the given rule."""
    margin, top = x["margin"], b.max(logits, 1)
    away, own, reach = b.op("Sub", logits, top), b.op("Sub", mine, top), margin
    if "temperature" in x:
        away, own = (b.op("Div", value, x["temperature"]) for value in (away, own))
        wide = (b.op("Cast", value, to=11) for value in (margin, x["temperature"]))
        reach = b.op("Mul", *wide)
    close = _within(b, mine, top, reach)
    total = b.sum(b.op("Exp", away), 1)
    share = b.op("Div", b.op("Exp", own), total)
    likely = _within(b, share, b.op("Div", b.f32(1.0), total), margin)
    by_log = b.op("Equal", rule, _int(b, LOG_MARGIN))
    near = b.op("Or", b.op("And", by_log, close), b.op("And", b.op("Not", by_log), likely))
    return b.op("And", near, b.op("Greater", margin, b.f32(0.0)))


def _before_close(b: FunctionBuilder, close: str, follow: str) -> str:
    """bool [R - 1]: whether no draft up to and including this one is the close id."""
    hit = b.op("And", b.op("Equal", follow, close), b.op("GreaterOrEqual", close, _int(b, 0)))
    return b.op("Equal", b.op("CumSum", b.cast(hit, I64), b.scalar(0)), _int(b, 0))
