"""Compares the error of a model's results with the error of its definition, both to float32."""

from __future__ import annotations

import numpy as np

from thor_dflash.core.tensors import Array

WORSE = 1.2
"""Most error, as a multiple of the definition's own. Over all blocks of 15 random models the ratio
was 0.98, with 1.34 at most in a single block; over the 48 rows of each of two models with five
seeds, 0.98 to 1.11."""


def hold_as_near(name: str, ours: Array, defined: Array, true: Array) -> None:
    """Check that `ours` is nearly as close to `true` as `defined` is, the definition with rows
    rounded to the same type. An error of 0 is wrong too: then nothing would have been rounded.
    """
    own, allowed = distance(ours, true), distance(defined, true)
    print(f"{name}: {own:.4f} of its size, the definition {allowed:.4f}")
    assert 0 < own <= WORSE * allowed, name


def distance(have: Array, want: Array) -> float:
    """Root mean square of the difference, relative to that of `want`."""
    off, size = (np.mean(np.square(x, dtype=np.float64)) for x in (have - want, want))
    return float(np.sqrt(off / size))
