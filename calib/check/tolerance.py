"""Decides whether two arrays are equal within tolerance, and where they differ most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from thor_dflash.calib.check.trace_record import Outputs, TracedStep
from thor_dflash.core.tensors import Array, DType

UNIT = {DType.BF16: 2.0**-7, DType.F16: 2.0**-10, DType.FP8: 2.0**-3}
"""Relative spacing of adjacent values: engines may round a value between two of them either way."""
SMALLEST_FP8 = 2.0**-9
"""Spacing of the smallest E4M3 numbers."""
JUMP = 8.0
"""A step whose outputs differ by this factor more than its inputs adds a difference of its own."""
NOTHING = 1e-300
"""Least scale to divide by, for values that are all 0."""
DUST = 1e-6
"""Smaller relative differences are ignored: the order of float32 sums causes them."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """One output that is wrong."""

    graph: str
    step: str
    op: str
    output: str
    error: float
    """Error of the worst element, as a share of the largest value; infinite for NaN or infinity, a
    wrong integer or a wrong shape."""
    limit: float
    at: tuple[int, ...]
    have: float
    want: float
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """The two shapes if they differ; then there is no place and no value."""


def against_definition(seen: TracedStep) -> Deviation | None:
    """Return the output with the largest error over its tolerance, if any. Outputs that the
    definition does not have are checked through the steps that read them.
    """
    want = seen.define()
    found = [
        _off(seen, port, have, want[port])
        for name, have in seen.outputs.items()
        if (port := seen.ports[name]) in want
    ]
    return max((off for off in found if off), key=lambda off: off.error, default=None)


def _off(seen: TracedStep, port: str, have: Array, want: Array) -> Deviation | None:
    if (found := differ(have, want, seen.tolerance)) is None:
        return None
    error, at = found
    place = (seen.graph, seen.step, seen.op, port)
    if have.shape != want.shape:
        none = float("nan")
        return Deviation(*place, error, seen.tolerance, at, none, none, (have.shape, want.shape))
    return Deviation(*place, error, seen.tolerance, at, float(have[at]), float(want[at]))


def differ(have: Array, want: Array, tolerance: float) -> tuple[float, tuple[int, ...]] | None:
    """Return error and place of the worst element, or None if within tolerance: `tolerance` times
    the largest value, plus one rounding of the element's type. Integers must be equal.
    """
    if have.shape != want.shape:
        return float("inf"), ()
    dtype = DType.of(want)
    a, b = have.astype(np.float64), want.astype(np.float64)
    if np.issubdtype(dtype.numpy, np.integer):
        wrong = np.argwhere(have != want)
        return (float("inf"), _place(wrong[0])) if len(wrong) else None
    if len(strange := np.argwhere(_strange(a, b))):
        return float("inf"), _place(strange[0])
    finite = np.isfinite(b)
    a, b = np.where(finite, a, 0.0), np.where(finite, b, 0.0)
    largest = np.abs(b).max(initial=0.0)
    least = SMALLEST_FP8 if dtype is DType.FP8 else 0.0
    margin = tolerance * largest + np.maximum(UNIT.get(dtype, 0.0) * np.abs(b), least)
    over = np.abs(a - b) - margin
    if not over.size or over.max() <= 0:
        return None
    at = _place(np.unravel_index(int(over.argmax()), over.shape))
    return float(np.abs(a - b)[at] / max(largest, NOTHING)), at


def _strange(a: Array, b: Array) -> Array:
    """Return where one value is NaN or infinite and the other is not the same, sign included."""
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.asarray(~(same | (np.isfinite(a) & np.isfinite(b))))


def _place(index: object) -> tuple[int, ...]:
    return tuple(int(i) for i in np.asarray(index))


def share(have: Array, want: Array) -> float:
    """Return `distance` as a share of the largest finite value of `want`."""
    b = want.astype(np.float64)
    largest = float(np.abs(b[np.isfinite(b)]).max(initial=0.0))
    return distance(have, want) / max(largest, NOTHING)


def distance(have: Array, want: Array) -> float:
    """Return the largest error; infinite for different shapes, or NaN or infinity in one only."""
    if have.shape != want.shape:
        return float("inf")
    a, b = have.astype(np.float64), want.astype(np.float64)
    if _strange(a, b).any():
        return float("inf")
    finite = np.isfinite(b)
    a, b = np.where(finite, a, 0.0), np.where(finite, b, 0.0)
    return float(np.abs(a - b).max(initial=0.0))


@dataclass(frozen=True, slots=True)
class Drift:
    """The differences between the values of a step and those of the other engine."""

    step: str
    read: float
    """Largest difference of its inputs."""
    left: float
    """Largest difference of its outputs."""


def drift(seen: TracedStep, other: Outputs) -> Drift | None:
    """Compare with values of the same names; None if the other engine has none of the outputs."""

    def furthest(values: Mapping[str, Array]) -> float | None:
        found = [share(x, other[name]) for name, x in values.items() if name in other]
        return max(found, default=None)

    left = furthest(seen.outputs)
    return None if left is None else Drift(seen.step, furthest(seen.inputs) or 0.0, left)


def jumps(drift: Drift, least: float) -> bool:
    """Whether a step adds a difference of its own, rather than pass on that of its inputs."""
    return drift.left > max(least, JUMP * max(drift.read, DUST))
