"""How near a kernel's results are to its reference: the worst element, and all of them together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from thor_dflash.core.tensors import Array, DType


@dataclass(frozen=True, slots=True)
class Near:
    """How near the results of an operator's kernels are, besides its TOLERANCE for each element."""

    apart: float = 0.0
    """Largest share of bf16 and FP8 results that are not the nearest ones."""
    error: float = 0.0
    """Largest root mean square of a float32 result's errors, relative to that of the result."""


NEAR = {
    "linear": Near(apart=0.01, error=1e-6),
    "head": Near(error=4e-7),
    "gdn": Near(apart=0.015, error=4e-7),
    "verify_attention": Near(apart=0.55),
    "draft_attention": Near(apart=0.55),
    "draft_conv": Near(apart=0.005),
    "selector": Near(error=4e-7),
    "context_kv": Near(apart=0.002),
    "standard": Near(apart=0.01),
    "accept": Near(),
    "sample": Near(),
    "layer_norm": Near(apart=0.005),
    "image_attention": Near(apart=0.55),
    "image_positions": Near(apart=0.005),
    "image_embed": Near(),
    "rms_norm": Near(apart=0.005),
    "fill_drafts": Near(),
}
"""By operator. Products round once, so few of their results are not the nearest; most of those are
sums that cancel. Attention also rounds its weights."""
PORTS = {
    "linear.y0_squares": Near(error=3e-4),
    "gdn.next_state": Near(error=2e-5),
    "verify_attention.next_cache_k": Near(apart=0.002),
    "verify_attention.next_cache_v": Near(apart=0.002),
}
"""Outputs of their own accuracy. Squares are of rounded results; a prefill multiplies float32 as
pairs of bf16."""
BIAS = 0.1
"""Most by which the share of results that are too small may exceed that of those that are too
large, or the reverse. Truncation instead of rounding makes it a half."""
FEW = 4
"""Results that may be off in any case, since a share of a few results says nothing."""


def near_of(operator: str, port: str) -> Near:
    """How near the kernels of an operator are to its reference."""
    return PORTS.get(f"{operator}.{port}") or NEAR[operator]


def hold_near(name: str, have: Array, want: Array, tolerance: float, near: Near | None) -> None:
    """Check one output. Integers, infinities and NaN are compared exactly, other floats to
    `tolerance` of the largest value, FP8 to one FP8 step more. `near` is what all errors together
    are held to, or None if the reference rounds what the kernel does not.
    """
    if np.issubdtype(want.dtype, np.integer):
        np.testing.assert_array_equal(have, want, name)
        return
    got, exact = have.astype(np.float64), want.astype(np.float64)
    bad = np.isfinite(got) != np.isfinite(exact)
    assert not bad.any(), f"{name}: {bad.sum()} not finite, at {np.argwhere(bad)[:4]}"
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(got[~finite], exact[~finite], name)
    got, exact = np.where(finite, got, 0), np.where(finite, exact, 0)
    _hold_each(name, got, exact, tolerance, want.dtype == DType.FP8.numpy)
    if near is None:
        return
    if want.dtype == np.float32:
        _hold_error(name, got, exact, near.error)
    else:
        _hold_shares(name, got, exact, near.apart)


def _hold_each(name: str, got: Array, exact: Array, tolerance: float, fp8: bool) -> None:
    largest = np.abs(exact).max(initial=0.0)
    step = np.maximum(np.abs(exact) / 8, 2.0**-9) * fp8
    over = np.abs(got - exact) - step - tolerance * largest
    worst = np.unravel_index(np.argmax(over), over.shape) if over.size else ()
    assert np.all(over <= 0), (
        f"{name}: off by {np.abs(got - exact)[worst] / largest:.3g} of the largest, "
        f"more than {tolerance:.3g}, at {tuple(map(int, worst))}: "
        f"{got[worst]:.6g}, not {exact[worst]:.6g} ({np.sum(over > 0)} of {over.size} are off)"
    )


def _hold_error(name: str, got: Array, exact: Array, limit: float) -> None:
    off, size = (float(np.linalg.norm(x)) for x in (got - exact, exact))
    assert off <= limit * size, f"{name}: {off / size:.3g} off as a whole, more than {limit}"


def _hold_shares(name: str, got: Array, exact: Array, limit: float) -> None:
    small, large = ((np.abs(got) < np.abs(exact)).sum(), (np.abs(got) > np.abs(exact)).sum())
    apart = np.sum(got != exact)
    assert apart <= limit * got.size + FEW, f"{name}: {apart} of {got.size} are not the nearest"
    assert abs(small - large) <= BIAS * got.size + FEW, (
        f"{name}: of {got.size}, {small} are too small and {large} are too large"
    )
