"""gdn as an ONNX function: a loop over the accepted records, then a scan over the rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from thor_dflash.core.tensors import DType
from thor_dflash.plugins.contract import Attributes
from thor_dflash.plugins.onnx_builder import FunctionBuilder, Inputs

F32 = DType.F32


@dataclass(frozen=True, slots=True)
class _Heads:
    hk: int
    hv: int
    dk: int
    dv: int

    def repeat(self, b: FunctionBuilder, x: str) -> str:
        """[T, Hk, D] -> [T, Hv, D]: value head j reads key head j // (Hv / Hk)."""
        if self.hk == self.hv:
            return x
        each = np.repeat(np.arange(self.hk), self.hv // self.hk)
        return b.op("Gather", x, b.const(each), axis=1)


def body(b: FunctionBuilder, x: Inputs, a: Attributes) -> Mapping[str, str]:
    """See the operator's docstring for shapes."""
    heads = _Heads(*(a.integer(n) for n in ("key_heads", "value_heads", "key_dim", "value_dim")))
    prefill, states = a.word("mode") == "prefill", a.word("saves") == "states"
    n = b.cast(x["accepted"], DType.I64)
    state = _pick(b, x, n) if states else _fold(b, x, heads, n)
    tail = _window(b, b.concat(0, x["tail"], x["record_qkv"]), n, x["tail"])
    inputs = b.concat(0, tail, x["qkv"])
    q, k, v = _convolve(b, x, heads, inputs, a.integer("conv_kernel"))
    decay, beta = _gates(b, x)
    if prefill:
        valid = b.cast(x["valid"], DType.I64)
        tail = _window(b, inputs, valid, x["tail"])
        # decay 1 and beta 0 leave the state unchanged.
        decay, beta = _only(b, valid, decay, 1.0, 4), _only(b, valid, beta, 0.0, 4)
    state_shape, row = (heads.hv, heads.dk, heads.dv), (heads.hv, 1, heads.dv)
    collected = [row] if prefill else [row, row, state_shape] if states else [row, row]
    last, o, *saved = b.scan(
        [(state, state_shape)],
        [_flat(b, heads, q), _flat(b, heads, k), _upright(b, heads, k), v, decay, beta],
        collected,
        lambda s, value: _step(s, value, len(collected)),
    )
    if prefill:
        o = _only(b, b.cast(x["valid"], DType.I64), o, 0.0, 4)
    out = {"o": b.narrow(b.reshape(o, 0, -1), x.dtype("qkv")), "next_tail": tail}
    if prefill:
        return out | {"next_state": last}
    out |= {"next_state": state, "next_record_qkv": x["qkv"]}
    if states:
        return out | {"next_states": saved[1]}
    return out | {
        "next_record_k": k,
        "next_record_d": b.op("Squeeze", saved[0], b.i64(2)),
        "next_record_decay": b.op("Squeeze", decay, b.i64(2, 3)),
    }


def _pick(b: FunctionBuilder, x: Inputs, n: str) -> str:
    """The state itself for n = 0, else the saved state of row n - 1."""
    row = b.op("Max", b.op("Sub", n, b.i64(1)), b.i64(0))
    saved = b.op("Squeeze", b.op("Gather", x["states"], row, axis=0), b.i64(0))
    return b.op("Where", b.op("Greater", n, b.i64(0)), saved, x["state"])


def _fold(b: FunctionBuilder, x: Inputs, heads: _Heads, n: str) -> str:
    k = b.op("Unsqueeze", heads.repeat(b, x["record_k"]), b.i64(3))
    d = b.op("Unsqueeze", x["record_d"], b.i64(2))
    decay = b.op("Unsqueeze", x["record_decay"], b.i64(2, 3))

    def step(s: FunctionBuilder, value: tuple[str, ...]) -> tuple[list[str], list[str]]:
        i, state = value
        row = [s.op("Gather", part, i, axis=0) for part in (k, d, decay)]
        kept = s.op("Mul", state, row[2])
        return [s.op("Add", kept, s.op("Mul", row[0], row[1]))], []

    return b.loop(b.op("Squeeze", n), [(x["state"], F32)], [], step)[0]


def _window(b: FunctionBuilder, rows: str, start: str, like: str) -> str:
    """Returns the rows from `start` on, as many as `like` has."""
    return b.slice(rows, start, b.op("Add", start, b.op("Shape", like, start=0, end=1)), 0)


def _convolve(
    b: FunctionBuilder, x: Inputs, heads: _Heads, inputs: str, kernel: int
) -> tuple[str, str, str]:
    wide = inputs if x.dtype("qkv") is F32 else b.cast(inputs, F32)
    weight = b.op("Transpose", b.op("Squeeze", x.f32(b, "conv_weight"), b.i64(1)), perm=(1, 0))
    rows = b.op("Shape", x["qkv"], start=0, end=1)
    total = ""
    for j in range(kernel):
        part = b.slice(wide, b.i64(j), b.op("Add", rows, b.i64(j)), 0)
        term = b.op("Mul", part, b.take(weight, j, j + 1, 0))
        total = b.op("Add", total, term) if total else term
    key = heads.hk * heads.dk
    q, k, v = b.split(b.silu(total), [key, key, heads.hv * heads.dv], axis=1)
    q, k = (_unit(b, b.reshape(u, 0, heads.hk, heads.dk)) for u in (q, k))
    q = b.op("Mul", q, b.f32(heads.dk**-0.5))
    return q, k, b.reshape(v, 0, heads.hv, 1, heads.dv)


def _unit(b: FunctionBuilder, u: str) -> str:
    square = b.op("Add", b.sum(b.op("Mul", u, u), -1), b.f32(1e-6))
    return b.op("Div", u, b.op("Sqrt", square))


def _gates(b: FunctionBuilder, x: Inputs) -> tuple[str, str]:
    """decay and beta, [T, Hv, 1, 1]."""
    rate = b.op("Softplus", b.op("Add", x.f32(b, "a"), x.f32(b, "dt_bias")))
    rate = b.op("Mul", b.op("Exp", x.f32(b, "a_log")), rate)
    axes = b.i64(2, 3)
    decay = b.op("Exp", b.op("Neg", rate))
    return (b.op("Unsqueeze", decay, axes), b.op("Unsqueeze", b.op("Sigmoid", x.f32(b, "b")), axes))


def _only(b: FunctionBuilder, valid: str, rows: str, rest: float, rank: int) -> str:
    """Replaces the rows from `valid` on with `rest`."""
    count = b.op("Squeeze", b.op("Shape", rows, start=0, end=1))
    row = b.reshape(b.op("Range", b.scalar(0), count, b.scalar(1)), -1, *(1,) * (rank - 1))
    return b.op("Where", b.op("Less", row, valid), rows, b.f32(rest))


def _flat(b: FunctionBuilder, heads: _Heads, x: str) -> str:
    """[T, Hk, D] -> [T, Hv, 1, D]."""
    return b.op("Unsqueeze", heads.repeat(b, x), b.i64(2))


def _upright(b: FunctionBuilder, heads: _Heads, x: str) -> str:
    """[T, Hk, D] -> [T, Hv, D, 1]."""
    return b.op("Unsqueeze", heads.repeat(b, x), b.i64(3))


def _step(
    s: FunctionBuilder, value: tuple[str, ...], collected: int
) -> tuple[list[str], list[str]]:
    """Runs one row: state [Hv, Dk, Dv]; q, k [Hv, 1, Dk]; k again as [Hv, Dk, 1]; v [Hv, 1, Dv];
    decay, beta [Hv, 1, 1].
    """
    state, q, k, upright, v, decay, beta = value
    state = s.op("Mul", state, decay)
    d = s.op("Mul", beta, s.op("Sub", v, s.op("MatMul", k, state)))
    state = s.op("Add", state, s.op("Mul", upright, d))
    o = s.op("MatMul", q, state)
    return [state], [o, d, state][:collected]
