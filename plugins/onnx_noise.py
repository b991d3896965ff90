"""Counter-based noise of sampling as ONNX nodes, bitwise equal to numpy_noise.py."""

from __future__ import annotations

import numpy as np

from thor_dflash.core.tensors import DType
from thor_dflash.plugins import numpy_noise
from thor_dflash.plugins.numpy_noise import EXP, LOG, MULTIPLIERS, ROUNDS, SQRT_HALF, TARGET, WEYL
from thor_dflash.plugins.onnx_builder import FunctionBuilder

_U64 = 13
"""ONNX's number of uint64."""
_WORD = 0xFFFFFFFF
_LOWEST, _HIGHEST = -126, 127
"""Exponents of normal numbers."""


def noise(b: FunctionBuilder, seed: str, positions: str, ids: str, purpose: int = TARGET) -> str:
    """float32 Gumbel noise. `seed` is int32 [2]: low and high word; `positions` and `ids` are int64
    and broadcast together.
    """
    return gumbel(b, words(b, seed, positions, ids, purpose))


def words(b: FunctionBuilder, seed: str, positions: str, ids: str, purpose: int = TARGET) -> str:
    """int64 words, 0 to 2^32 - 1, of the shape that `positions` and `ids` broadcast to."""
    zero = b.op("Mul", b.op("Add", positions, ids), b.scalar(0))
    spread = (b.op("Div", ids, b.scalar(4)), positions, b.scalar(purpose), b.scalar(0))
    counter = [b.op("Cast", b.op("Add", x, zero), to=_U64) for x in spread]
    key = b.op("BitwiseAnd", b.op("Cast", seed, to=_U64), _u64(b, _WORD))
    four = _philox(b, counter, b.take(key, 0, 1, 0), b.take(key, 1, 2, 0))
    lane = b.op("Mod", ids, b.scalar(4))
    word = b.cast(four[3], DType.I64)
    for i in range(3):
        word = b.op("Where", b.op("Equal", lane, b.scalar(i)), b.cast(four[i], DType.I64), word)
    return word


def gumbel(b: FunctionBuilder, word: str) -> str:
    """float32 standard Gumbel noise of int64 words."""
    return b.op("Neg", log(b, exponential(b, word)))


def exponential(b: FunctionBuilder, word: str) -> str:
    """float32 -ln(1 - u) of int64 words."""
    near = b.op("Less", word, b.scalar(numpy_noise.NEAR_ONE))
    used = b.op("Where", near, word, b.op("Sub", b.scalar(_WORD), word))
    x = b.op("Mul", b.op("Add", b.cast(used, DType.F32), b.f32(0.5)), b.f32(2.0**-32))
    k, t = _log_parts(b, b.op("Where", near, b.f32(1.0), x))
    return b.op("Neg", _log(b, k, b.op("Where", near, b.op("Neg", x), t)))


def log(b: FunctionBuilder, x: str) -> str:
    """Natural logarithm of normal positive float32 numbers."""
    return _log(b, *_log_parts(b, x))


def exp(b: FunctionBuilder, z: str) -> str:
    """e^z of float32 numbers of at most 0; 0 below EXP_LOWEST."""
    inside = b.op("Max", z, b.f32(numpy_noise.EXP_LOWEST))
    k = b.op("Round", b.op("Mul", inside, b.f32(numpy_noise.LOG2_E)))
    high = b.op("Sub", inside, b.op("Mul", k, b.f32(numpy_noise.LN2_HIGH)))
    r = b.op("Sub", high, b.op("Mul", k, b.f32(numpy_noise.LN2_LOW)))
    value = b.op("Mul", _polynomial(b, EXP, r), _power(b, k))
    low = b.op("Less", z, b.f32(numpy_noise.EXP_LOWEST))
    return b.op("Where", low, b.f32(0.0), value)


def _u64(b: FunctionBuilder, value: int) -> str:
    return b.const(np.array(value, np.uint64))


def _philox(b: FunctionBuilder, counter: list[str], k0: str, k1: str) -> list[str]:
    half = _u64(b, 32)
    x0, x1, x2, x3 = counter
    for round_ in range(ROUNDS):
        keys = (
            b.op("BitwiseAnd", b.op("Add", k, _u64(b, round_ * w & _WORD)), _u64(b, _WORD))
            for k, w in zip((k0, k1), WEYL, strict=True)
        )
        p0, p1 = (b.op("Mul", x, _u64(b, m)) for x, m in zip((x0, x2), MULTIPLIERS, strict=True))
        (h0, l0), (h1, l1) = (
            (
                b.op("BitShift", p, half, direction="RIGHT"),
                b.op("BitwiseAnd", p, _u64(b, _WORD)),
            )
            for p in (p0, p1)
        )
        x0, x2 = (
            b.op("BitwiseXor", b.op("BitwiseXor", h, x), k)
            for h, x, k in zip((h1, h0), (x1, x3), keys, strict=True)
        )
        x1, x3 = l1, l0
    return [x0, x1, x2, x3]


def _log_parts(b: FunctionBuilder, x: str) -> tuple[str, str]:
    """k, t with x = 2^k (1 + t). The library's logarithm only estimates k: one off is corrected."""
    guess = b.op("Round", b.op("Mul", b.op("Log", x), b.f32(numpy_noise.LOG2_E)))
    m = b.op("Mul", x, _power(b, b.op("Neg", guess)))
    for bound, step, scale in ((SQRT_HALF, -1.0, 2.0), (2 * SQRT_HALF, 1.0, 0.5)):
        kind = "Less" if step < 0 else "GreaterOrEqual"
        off = b.op(kind, m, b.f32(bound))
        m = b.op("Where", off, b.op("Mul", m, b.f32(scale)), m)
        guess = b.op("Where", off, b.op("Add", guess, b.f32(step)), guess)
    return guess, b.op("Sub", m, b.f32(1.0))


def _log(b: FunctionBuilder, k: str, t: str) -> str:
    s = b.op("Mul", t, t)
    r = b.op("Mul", b.op("Mul", _polynomial(b, LOG, t), t), s)
    r = b.op("Add", r, b.op("Mul", k, b.f32(numpy_noise.LN2_LOW)))
    r = b.op("Sub", r, b.op("Mul", b.f32(0.5), s))
    r = b.op("Add", t, r)
    return b.op("Add", r, b.op("Mul", k, b.f32(numpy_noise.LN2_HIGH)))


def _polynomial(b: FunctionBuilder, coefficients: tuple[np.float32, ...], x: str) -> str:
    r = b.f32(coefficients[0])
    for c in coefficients[1:]:
        r = b.op("Add", b.op("Mul", r, x), b.f32(c))
    return r


def _power(b: FunctionBuilder, k: str) -> str:
    """2^k for float32 integers k, exactly, from a table."""
    table = b.const(np.ldexp(np.float32(1), np.arange(_LOWEST, _HIGHEST + 1)).astype(np.float32))
    at = b.op("Add", b.cast(k, DType.I64), b.scalar(-_LOWEST))
    return b.op("Gather", table, at, axis=0)
