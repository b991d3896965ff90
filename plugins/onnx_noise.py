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
    quads = b.op("Div", ids, b.scalar(4))
    counter = [
        b.reshape(b.op("Add", x, zero), 1, -1)
        for x in (quads, positions, b.scalar(purpose), b.scalar(0))
    ]
    even, odd = (b.op("Cast", b.concat(0, counter[i], counter[i + 2]), to=_U64) for i in (0, 1))
    four = b.cast(b.concat(0, *_philox(b, even, odd, seed)), DType.I64)
    lane = b.reshape(b.op("Add", b.op("Mod", ids, b.scalar(4)), zero), 1, -1)
    place = b.op("Gather", b.const(np.array([0, 2, 1, 3])), lane, axis=0)
    return b.op("Reshape", b.op("GatherElements", four, place, axis=0), b.op("Shape", zero))


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


def inverse(b: FunctionBuilder, x: str) -> str:
    """1 / x. ONNX Runtime would make y / x of y * (1 / x), rounded once, if it saw the 1."""
    return b.op("Div", b.op("Div", x, x), x)


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


def _philox(b: FunctionBuilder, even: str, odd: str, seed: str) -> tuple[str, str]:
    """The words of N counters: words 0 and 2 as [2, N], and words 1 and 3."""
    mask, half = _u64(b, _WORD), _u64(b, 32)
    steps = np.outer(np.arange(ROUNDS, dtype=np.uint64), np.array(WEYL, np.uint64))
    keys = b.op("Add", b.op("Cast", seed, to=_U64), b.const(steps))
    keys = b.reshape(b.op("BitwiseAnd", keys, mask), ROUNDS, 2, 1)
    multipliers, exchanged = b.const(np.array(MULTIPLIERS, np.uint64)[:, None]), b.i64(1, 0)
    for key in b.split(keys, [1] * ROUNDS, 0):
        product = b.op("Gather", b.op("Mul", even, multipliers), exchanged, axis=0)
        high = b.op("BitShift", product, half, direction="RIGHT")
        even = b.op("BitwiseXor", b.op("BitwiseXor", high, odd), b.reshape(key, 2, 1))
        odd = b.op("BitwiseAnd", product, mask)
    return even, odd


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
