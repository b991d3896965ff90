"""When two arrays are the same, and where they first are not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from thor_dflash.calib.check.seen import Outputs, Seen
from thor_dflash.tensors import Array, DType

UNIT = {DType.BF16: 2.0**-7, DType.F16: 2.0**-10, DType.FP8: 2.0**-3}
"""Distance of neighbours, relative: where a value lies between two, engines may part."""
SMALLEST_FP8 = 2.0**-9
"""Distance of the smallest E4M3 numbers."""
JUMP = 8.0
"""A step that is off by this much more than all that it read has a fault of its own."""
NOTHING = 1e-300
"""The scale of values that are all 0."""
DUST = 1e-6
"""Off by less is not off: two orders of summing float32."""


@dataclass(frozen=True, slots=True)
class Off:
    """One output that is not what it should be."""

    graph: str
    step: str
    room: str
    output: str
    error: float
    """Largest error, as a share of the largest value; infinite where one is no number."""
    limit: float
    at: tuple[int, ...]
    have: float
    want: float
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """Where the two are of different shapes: these, and there is no place and no value."""


def against_definition(seen: Seen) -> Off | None:
    """The output furthest over its tolerance, if one is. Outputs the definition does not speak of
    are judged by the steps that read them.
    """
    want = seen.define()
    found = [
        _off(seen, port, have, want[port])
        for name, have in seen.outputs.items()
        if (port := seen.ports[name]) in want
    ]
    return max((off for off in found if off), key=lambda off: off.error, default=None)


def _off(seen: Seen, port: str, have: Array, want: Array) -> Off | None:
    if (found := differ(have, want, seen.tolerance)) is None:
        return None
    error, at = found
    place = (seen.graph, seen.step, seen.room, port)
    if have.shape != want.shape:
        none = float("nan")
        return Off(*place, error, seen.tolerance, at, none, none, (have.shape, want.shape))
    return Off(*place, error, seen.tolerance, at, float(have[at]), float(want[at]))


def differ(have: Array, want: Array, tolerance: float) -> tuple[float, tuple[int, ...]] | None:
    """Error and place of the worst element, where it is over `tolerance` of the largest value and
    one rounding of the element's type. Integers must be equal.
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
    room = tolerance * largest + np.maximum(UNIT.get(dtype, 0.0) * np.abs(b), least)
    over = np.abs(a - b) - room
    if not over.size or over.max() <= 0:
        return None
    at = _place(np.unravel_index(int(over.argmax()), over.shape))
    return float(np.abs(a - b)[at] / max(largest, NOTHING)), at


def _strange(a: Array, b: Array) -> Array:
    """Where one is no number and the other is not the very same: an infinity has a sign."""
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.asarray(~(same | (np.isfinite(a) & np.isfinite(b))))


def _place(index: object) -> tuple[int, ...]:
    return tuple(int(i) for i in np.asarray(index))


def share(have: Array, want: Array) -> float:
    """Largest error as a share of the largest value; infinite where one is no number."""
    b = want.astype(np.float64)
    largest = float(np.abs(b[np.isfinite(b)]).max(initial=0.0))
    return distance(have, want) / max(largest, NOTHING)


def distance(have: Array, want: Array) -> float:
    """Largest error; infinite where one is no number."""
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
    """How far the values of a step are from the other engine's."""

    step: str
    read: float
    """The furthest of what it read."""
    left: float
    """The furthest of what it left."""


def drift(seen: Seen, other: Outputs) -> Drift | None:
    """Against values of the same names; None where the other engine has none that it left."""

    def furthest(values: Mapping[str, Array]) -> float | None:
        found = [share(x, other[name]) for name, x in values.items() if name in other]
        return max(found, default=None)

    left = furthest(seen.outputs)
    return None if left is None else Drift(seen.step, furthest(seen.inputs) or 0.0, left)


def jumps(drift: Drift, floor: float) -> bool:
    """Whether the step itself parts from the other engine, not only what it was given."""
    return drift.left > max(floor, JUMP * max(drift.read, DUST))
