"""Counter-based noise of sampling in numpy; cuda/noise.cuh and onnx_noise.py are bitwise equal.

Philox4x32-10, keyed by the request's seed. The counter of token id v at absolute position n is
(v div 4, n, purpose, 0), and its word is number v mod 4. No stream is consumed, so the noise of a
position does not depend on what was drafted, cancelled or restored before it.

All float arithmetic is float32 in the order written here, each operation rounded once (no fused
multiply-add), so that every engine computes the same bits. Logarithm and exponential are
polynomials, fitted in the minimax sense, with a relative error of about 1e-7.

Source: Salmon et al. 2011 (Philox); Cody and Waite (reduction by ln 2 in two parts).
"""

from __future__ import annotations

import numpy as np

from thor_dflash.core.tensors import Array

TARGET, DRAFT, ACCEPT, RESIDUAL = 0, 1, 2, 3
"""Purposes. Coupled sampling uses TARGET alone, for drafts too. Rejection must not share noise: it
draws drafts by DRAFT, accepts by the word of id 0 of ACCEPT, and draws what remains by RESIDUAL."""

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
"""Added to the key after each round."""

SQRT_HALF = np.uint32(0x3F3504F3).view(np.float32)
"""Mantissas are reduced to [SQRT_HALF, 2 * SQRT_HALF)."""
NEAR_ONE = 1257966796
"""Words below it have 1 - u >= sqrt(1/2), where ln(1 - u) is computed from u itself."""
TWO_M32 = np.float32(2.0**-32)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
LOG2_E = np.float32(1.44269504)
LOG = tuple(
    np.float32(c)
    for c in (
        *(0.0870043486, -0.142674863, 0.149147689, -0.16577585),
        *(0.199630633, -0.250013381, 0.333339095),
    )
)
"""ln(1 + t) = t - t^2 / 2 + t^3 * polynomial(t), highest power first. Relative error 3.2e-8."""
EXP = tuple(
    np.float32(c) for c in (0.00139504788, 0.00836888235, 0.041666206, 0.166665196, 0.5, 1.0, 1.0)
)
"""e^r = polynomial(r) for |r| <= ln(2) / 2, highest power first."""
EXP_LOWEST = np.float32(-87.0)
"""Below it the exponential is 0."""


def philox(counter: tuple[Array, ...], key: tuple[int, int]) -> tuple[Array, ...]:
    """Returns the four uint32 words of each counter; `counter` is four uint32 arrays."""
    low = np.uint64(0xFFFFFFFF)
    x0, x1, x2, x3 = (np.asarray(c, np.uint64) for c in counter)
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = np.uint64(MULTIPLIERS[0]) * x0, np.uint64(MULTIPLIERS[1]) * x2
        x0, x1, x2, x3 = (
            (p1 >> np.uint64(32)) ^ x1 ^ np.uint64(k0),
            p1 & low,
            (p0 >> np.uint64(32)) ^ x3 ^ np.uint64(k1),
            p0 & low,
        )
        k0, k1 = (k0 + WEYL[0]) & 0xFFFFFFFF, (k1 + WEYL[1]) & 0xFFFFFFFF
    return tuple(x.astype(np.uint32) for x in (x0, x1, x2, x3))


def words(seed: int, positions: Array, ids: Array, purpose: int = TARGET) -> Array:
    """Returns uint32 words of token ids at absolute positions (broadcast together); `seed` is an
    unsigned 64-bit number.
    """
    ids, positions = np.broadcast_arrays(np.asarray(ids, np.int64), np.asarray(positions, np.int64))
    same = np.zeros(ids.shape, np.uint32)
    four = philox(
        (ids // 4, positions, same + np.uint32(purpose), same), (seed & 0xFFFFFFFF, seed >> 32)
    )
    return np.choose(ids % 4, four)


def log(x: Array) -> Array:
    """Natural logarithm of normal positive float32 numbers."""
    x = np.asarray(x, np.float32)
    bits = x.view(np.int32)
    k = (bits - SQRT_HALF.view(np.int32)) >> 23
    m = (bits - (k << 23)).view(np.float32)
    return _log(k.astype(np.float32), m - np.float32(1))


def _log(k: Array, t: Array) -> Array:
    """k ln(2) + ln(1 + t)."""
    s = t * t
    r = np.full_like(t, LOG[0])
    for c in LOG[1:]:
        r = r * t + c
    r = (r * t) * s
    r = r + k * LN2_LOW
    r = r - np.float32(0.5) * s
    r = t + r
    return np.asarray(r + k * LN2_HIGH)


def exp(z: Array) -> Array:
    """e^z of float32 numbers of at most 0; 0 below EXP_LOWEST."""
    z = np.asarray(z, np.float32)
    inside = np.maximum(z, EXP_LOWEST)
    k = np.rint(inside * LOG2_E)
    r = (inside - k * LN2_HIGH) - k * LN2_LOW
    p = np.full_like(r, EXP[0])
    for c in EXP[1:]:
        p = p * r + c
    scale = ((k.astype(np.int32) + np.int32(127)) << 23).view(np.float32)
    return np.asarray(np.where(z < EXP_LOWEST, np.float32(0), p * scale))


def exponential(word: Array) -> Array:
    """float32 E = -ln(1 - u) with u = (word + 1/2) / 2^32: exponentially distributed, and as
    precise near u = 0, where a draw wins, as near u = 1.
    """
    word = np.asarray(word, np.uint32)
    half = np.float32(0.5)
    u = (word.astype(np.float32) + half) * TWO_M32
    rest = ((~word).astype(np.float32) + half) * TWO_M32
    near = _log(np.zeros_like(u), -u)
    return -np.where(word < NEAR_ONE, near, log(rest))


def uniform(word: Array) -> Array:
    """float64 (word + 1/2) / 2^32, exactly."""
    return (np.asarray(word, np.float64) + 0.5) * 2.0**-32


def gumbel(word: Array) -> Array:
    """float32 -ln(E), of the standard Gumbel distribution."""
    return -log(exponential(word))


def noise(seed: int, positions: Array, ids: Array, purpose: int = TARGET) -> Array:
    """Returns float32 Gumbel noise of token ids at absolute positions (broadcast together)."""
    return gumbel(words(seed, positions, ids, purpose))
