"""Every operator's ONNX function, run by ONNX Runtime, equals its numpy reference."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from support.closeness import Near, hold_near
from support.op_cases import CASES, OpCase
from support.op_models import model, run

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins import OPS
from thor_dflash.plugins.contract import Op

STEP = {DType.BF16: 2.0**-7, DType.F16: 2.0**-10}
"""One rounding of a narrow type."""
FUNCTION = Near(apart=0.01, error=1e-6)

FURTHER = [f"seed_{i}_rejecting" for i in range(2, 6)]
"""Random cases of `sample` like two others."""

OPERATORS = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


def every_case() -> Iterator[object]:
    for op in OPS:
        for case in CASES[op.name](np.random.default_rng(7)):
            further = op.name == "sample" and case.name in FURTHER
            marks = pytest.mark.slow if further else ()
            yield pytest.param(op, case, id=f"{op.name}-{case.name}", marks=marks)


@pytest.mark.parametrize(("op", "case"), list(every_case()))
def test_body_equals_reference(op: Op, case: OpCase) -> None:
    want = op.reference(case.inputs, op.complete(case.attributes))
    got = run(model(op, case, want), case.inputs, want)
    for name, value in want.items():
        compare(op, got[name], value, name)


def compare(op: Op, got: Array, want: Array, name: str) -> None:
    """A function computes in float32 and rounds where the reference, in float64, does."""
    hold_near(f"{op.name}.{name}", got, want, op.rtol + STEP.get(DType.of(want), 0.0), FUNCTION)
