"""Sums over activations against the operators' definitions in numpy."""

from __future__ import annotations

import numpy as np
import pytest

from thor_dflash.calib.calibrate.activations import ActivationSums, linear_input
from thor_dflash.core.errors import CheckpointError
from thor_dflash.core.tensors import DType
from thor_dflash.plugins import LINEAR
from thor_dflash.plugins.linear.reference import prologue

GATES = [-1e4, -89.0, -20.0, -1e-8, 0.0, 0.5, 20.0, 1e4]
"""Beyond what float32's exp holds, and near none."""


@pytest.mark.parametrize("gate", ["none", "sigmoid", "silu"])
@pytest.mark.parametrize("norm", [0, 8, 32])
@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
def test_a_linear_receives_its_prologue(gate: str, norm: int, dtype: DType) -> None:
    rng = np.random.default_rng(norm)
    made = {"x": rng.normal(size=(3, 32)) * [[1], [1e-6], [300]]}
    if norm:
        made["norm_weight"] = rng.normal(size=norm)
    if gate != "none":
        made["gate"] = np.resize(GATES, (3, 32))
    x = {name: value.astype(np.float32).astype(dtype.numpy) for name, value in made.items()}
    given = {name: value.copy() for name, value in x.items()}
    attributes = {"norm_eps": 1e-6, "norm_offset": 1.0, "head_dim": norm % 32, "gate": gate}
    a = LINEAR.complete(attributes)
    have, want = linear_input(x, a), prologue(x, a)
    np.testing.assert_allclose(have, want, rtol=1e-6, atol=1e-33)
    for name, value in given.items():
        np.testing.assert_array_equal(x[name], value)


def test_sums_are_those_of_all_rows() -> None:
    rows = np.random.default_rng(1).normal(size=(9, 5)).astype(np.float32)
    rows[4] = -7
    sums = ActivationSums()
    for part in (rows[:2], rows[2:3], rows[3:]):
        sums.received("x", part)
    found = sums.inputs()["x"]
    np.testing.assert_allclose(found.energy, (rows.astype(np.float64) ** 2).mean(axis=0), rtol=1e-7)
    assert found.amax == 7


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_and_large_numbers_are_not(bad: float) -> None:
    rows = np.full((2, 3), 3e38, np.float32)
    sums = ActivationSums()
    sums.received("x", rows)
    rows[1, 2] = bad
    with pytest.raises(CheckpointError):
        sums.received("x", rows)
