"""verify_attention as an ONNX function: writes the rows, then loops over tiles with a running
softmax.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from thor_dflash.core.tensors import DType
from thor_dflash.plugins import onnx_math
from thor_dflash.plugins.contract import Attributes
from thor_dflash.plugins.onnx_builder import FunctionBuilder, Inputs
from thor_dflash.plugins.verify_attention.reference import mrope_streams

F32 = DType.F32


def body(b: FunctionBuilder, x: Inputs, a: Attributes) -> Mapping[str, str]:
    """See the operator's docstring for shapes."""
    heads, kv = a.integer("heads"), a.integer("kv_heads")
    at = onnx_math.positions(b, x["length"], x["q"])
    where = _positions(b, x, a, at)
    q = b.round(_turned(b, x, a, "q", where, heads), x.dtype("q"))
    k = b.op("Transpose", _turned(b, x, a, "k", where, kv), perm=(1, 0, 2))
    v = onnx_math.heads_first(b, x.f32(b, "v"), kv, a.integer("head_dim"))
    caches = {"k": _write(b, x, "k", k, at, kv), "v": _write(b, x, "v", v, at, kv)}
    o = _attend(b, x, a, q, caches, at)
    out = {"o": b.narrow(o, x.dtype("q"))}
    for name, cache in caches.items():
        fp8 = x.dtype(f"cache_{name}") is DType.FP8
        out[f"next_cache_{name}"] = b.cast(cache, DType.FP8) if fp8 else cache
    return out


def _turned(b: FunctionBuilder, x: Inputs, a: Attributes, name: str, at: str, heads: int) -> str:
    dim = a.integer("head_dim")
    by_head = b.reshape(x.f32(b, name), 0, heads, dim)
    normed = onnx_math.rms_norm(
        b, by_head, x.f32(b, f"{name}_norm"), a.real("norm_eps"), a.real("norm_offset")
    )
    return onnx_math.rope(
        b,
        normed,
        at,
        dim,
        a.integer("rotary_dim"),
        a.real("rope_theta"),
        by_pair="at" in x,
    )


def _positions(b: FunctionBuilder, x: Inputs, a: Attributes, at: str) -> str:
    """The positions by which rows turn: [T], or [T, rotary_dim / 2] by pair of columns."""
    if "at" in x:
        streams = mrope_streams(a)
        return b.op("Gather", x["at"], b.const(streams), axis=1)
    return b.op("Add", at, b.cast(x["shift"], DType.I64)) if "shift" in x else at


def _write(b: FunctionBuilder, x: Inputs, name: str, rows: str, at: str, kv: int) -> str:
    dtype = x.dtype(f"cache_{name}")
    rows = b.op("Div", rows, x[f"scale_{name}"])
    if dtype is not DType.FP8:
        return onnx_math.scatter_rows(b, x[f"cache_{name}"], b.narrow(rows, dtype), at, kv)
    # ScatterND and Slice do not support FP8. Every FP8 value is exact in float32, so going through
    # float32 changes nothing.
    cache = b.cast(x[f"cache_{name}"], F32)
    return onnx_math.scatter_rows(b, cache, b.round(rows, dtype), at, kv)


def _attend(
    b: FunctionBuilder, x: Inputs, a: Attributes, q: str, caches: Mapping[str, str], at: str
) -> str:
    heads, kv, dim = (a.integer(n) for n in ("heads", "kv_heads", "head_dim"))
    group, tile = heads // kv, a.integer("tile")
    by_group = b.op("Transpose", b.reshape(q, 0, kv, group, dim), perm=(1, 2, 0, 3))
    scaled = b.op("Mul", by_group, b.op("Mul", b.f32(dim**-0.5), x["scale_k"]))
    q = b.reshape(scaled, 0, -1, dim)
    row = b.reshape(
        b.op("Expand", b.reshape(at, 1, -1), b.concat(0, b.i64(group), b.op("Shape", at))), 1, -1, 1
    )
    end = b.op("Add", b.op("ReduceMax", at, b.i64(0), keepdims=0), b.scalar(1))
    tiles = b.op("Div", b.op("Add", end, b.scalar(tile - 1)), b.scalar(tile))
    shape = b.op("Shape", q)
    empty = b.concat(0, b.op("Slice", shape, b.i64(0), b.i64(2)), b.i64(1))
    start = [
        b.op("Expand", b.f32(value), to)
        for value, to in ((-np.inf, empty), (0.0, empty), (0.0, shape))
    ]

    def step(s: FunctionBuilder, value: tuple[str, ...]) -> tuple[list[str], list[str]]:
        i, best, total, mixed = value
        first = s.op("Mul", s.reshape(i, 1), s.i64(tile))
        k, v = (_tile(s, caches[n], x.dtype(f"cache_{n}"), first, tile) for n in ("k", "v"))
        where = s.op("Add", s.const(np.arange(tile)), first)
        # Cache rows past the end may contain NaN, and NaN times a zero weight is NaN.
        v = s.op("Where", s.op("Less", s.reshape(where, 1, -1, 1), end), v, s.f32(0.0))
        scores = s.op("MatMul", q, s.op("Transpose", k, perm=(0, 2, 1)))
        seen = s.op("LessOrEqual", s.reshape(where, 1, 1, -1), row)
        scores = s.op("Where", seen, scores, s.f32(-np.inf))
        top = s.op("Max", best, s.max(scores, -1))
        weight, keep = s.op("Exp", s.op("Sub", scores, top)), s.op("Exp", s.op("Sub", best, top))
        total = s.op("Add", s.op("Mul", total, keep), s.sum(weight, -1))
        mixed = s.op("Add", s.op("Mul", mixed, keep), s.op("MatMul", weight, v))
        return [top, total, mixed], []

    _, total, mixed = b.loop(tiles, [(v, F32) for v in start], [], step)
    o = b.op("Mul", b.op("Div", mixed, total), x["scale_v"])
    o = b.op("Transpose", b.reshape(o, kv, group, -1, dim), perm=(2, 0, 1, 3))
    return b.reshape(o, 0, -1)


def _tile(s: FunctionBuilder, cache: str, dtype: DType, first: str, tile: int) -> str:
    rows = s.slice(cache, first, s.op("Add", first, s.i64(tile)), 1)
    return s.cast(rows, F32) if dtype is DType.BF16 else rows
