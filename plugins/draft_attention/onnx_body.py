"""draft_attention as an ONNX function: one masked softmax over the ring and the block; the mask is
computed from the position in each ring slot.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from thor_dflash.core.tensors import DType
from thor_dflash.plugins import onnx_math
from thor_dflash.plugins.contract import Attributes
from thor_dflash.plugins.onnx_builder import FunctionBuilder, Inputs


def body(b: FunctionBuilder, x: Inputs, a: Attributes) -> Mapping[str, str]:
    """See the operator's docstring for shapes."""
    heads, kv, dim = (a.integer(n) for n in ("heads", "kv_heads", "head_dim"))
    at = onnx_math.positions(b, x["length"], x["q"])
    q = b.round(_turned(b, x, a, "q", at, heads), x.dtype("q"))
    k = b.round(_turned(b, x, a, "k", at, kv), x.dtype("k"))
    k = b.op("Transpose", k, perm=(1, 0, 2))
    v = onnx_math.heads_first(b, x.f32(b, "v"), kv, dim)
    live, context = _context(b, x)
    first = b.op("Min", b.cast(x["first"], DType.I64), b.cast(x["length"], DType.I64))
    keys = b.concat(1, _live(b, x, "ring_k", live), k)
    # A slot that was never written may hold NaN, and NaN times a zero weight is NaN.
    filled = b.op("GreaterOrEqual", context, first)
    known = b.op("Where", b.reshape(filled, 1, -1, 1), _live(b, x, "ring_v", live), b.f32(0.0))
    values = b.concat(1, known, v)
    seen = _seen(b, x, a, at, first, b.concat(0, context, at))
    group = heads // kv
    q = b.op("Transpose", b.reshape(q, 0, kv, group, dim), perm=(1, 2, 0, 3))
    q = b.reshape(b.op("Mul", q, b.f32(dim**-0.5)), 0, -1, dim)
    scores = b.op("MatMul", q, b.op("Transpose", keys, perm=(0, 2, 1)))
    by_row = b.op(
        "Reshape", scores, b.concat(0, b.i64(kv, group, -1), b.op("Shape", keys, start=1, end=2))
    )
    weight = b.op("Softmax", b.op("Where", seen, by_row, b.f32(-np.inf)), axis=-1)
    weight = b.op("Reshape", weight, b.op("Shape", scores))
    o = b.reshape(b.op("MatMul", weight, values), kv, group, -1, dim)
    o = b.reshape(b.op("Transpose", o, perm=(2, 0, 1, 3)), 0, -1)
    return {"o": b.narrow(o, x.dtype("q"))}


def _turned(b: FunctionBuilder, x: Inputs, a: Attributes, name: str, at: str, heads: int) -> str:
    dim = a.integer("head_dim")
    by_head = b.reshape(x.f32(b, name), 0, heads, dim)
    normed = onnx_math.rms_norm(b, by_head, x.f32(b, f"{name}_norm"), a.real("norm_eps"), 0.0)
    return onnx_math.rope(b, normed, at, dim, a.integer("rotary_dim"), a.real("rope_theta"))


def _context(b: FunctionBuilder, x: Inputs) -> tuple[str, str]:
    """Returns the number of slots in use, int64 [1], and their positions, int64 [live]."""
    length = b.cast(x["length"], DType.I64)
    slots = b.op("Shape", x["ring_k"], start=1, end=2)
    live = b.op("Min", length, slots)
    slot = b.op("Range", b.scalar(0), b.op("Squeeze", live), b.scalar(1))
    # The newest position p < length with p mod N = slot. Slots are below the length, so the
    # division never sees a negative number, on which ONNX truncates.
    laps = b.op("Div", b.op("Sub", b.op("Sub", length, b.i64(1)), slot), slots)
    return live, b.op("Add", slot, b.op("Mul", laps, slots))


def _live(b: FunctionBuilder, x: Inputs, name: str, live: str) -> str:
    rows = b.slice(x[name], b.i64(0), live, 1)
    return rows if x.dtype(name) is DType.F32 else b.cast(rows, DType.F32)


def _seen(b: FunctionBuilder, x: Inputs, a: Attributes, at: str, first: str, where: str) -> str:
    """bool [T, keys]: whether a row sees a key."""
    distance = b.op("Sub", b.reshape(at, -1, 1), b.reshape(where, 1, -1))
    window = b.cast(x["window"], DType.I64)
    near = b.op("Less", b.op("Abs", distance), window)
    seen = b.op("Or", near, b.op("Equal", window, b.i64(0)))
    # Rows of the block are at or past the length, hence at or past this `first`.
    seen = b.op("And", seen, b.op("GreaterOrEqual", where, first))
    if a.integer("causal"):
        seen = b.op("And", seen, b.op("GreaterOrEqual", distance, b.scalar(0)))
    return seen
