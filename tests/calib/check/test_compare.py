"""How `check` judges: when two values differ, when a step adds a difference of its own, what a
report says, and a head's definition when it is computed in parts.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from support.op_cases import CASES

from thor_dflash.calib.check import compare
from thor_dflash.calib.check import reference_run as define
from thor_dflash.calib.check.compare import GraphCheck, logits, walk
from thor_dflash.calib.check.tolerance import differ
from thor_dflash.calib.check.trace_record import Outputs, StepTracer, TracedStep
from thor_dflash.core.progress import Silent
from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins import HEAD
from thor_dflash.runtime.session import Session


def test_differences_are_judged_by_the_largest_value_and_one_rounding() -> None:
    want = np.array([100.0, 1.0], np.float32)
    assert differ(want + np.float32(0.05), want, 1e-3) is None
    error, at = differ(want + np.array([0, 0.2], np.float32), want, 1e-3) or (0, ())
    assert (round(error, 4), at) == (0.002, (1,))
    narrow = want.astype(DType.BF16.numpy)
    up = np.nextafter(narrow, DType.BF16.numpy.type(np.inf))
    assert differ(up, narrow, 0.0) is None
    nan = np.array([np.nan, 1.0], np.float32)
    assert differ(nan, want, 1.0) == (float("inf"), (0,))
    assert differ(nan, nan, 0.0) is None
    ids = np.array([1, 2], np.int32)
    assert differ(ids + np.int32(1), ids, 1.0) is not None


def test_a_head_is_defined_in_parts_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(define, "PART", 40)
    for case in CASES["head"](np.random.default_rng(5)):
        a = HEAD.complete(case.attributes)
        want = HEAD.reference(case.inputs, a)
        got = define.define(HEAD, case.inputs, a, want)
        for name, value in want.items():
            assert differ(got[name], value, 1e-6) is None, (case.name, name)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("strange", [np.nan, np.inf, -np.inf])
def test_a_row_with_nan_or_infinity_does_not_change_how_others_are_judged(strange: float) -> None:
    want = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    broken = want.copy()
    broken[2, 3] = strange
    same = logits(broken, broken, 0.0)
    assert (same.first, same.worst, same.choices, same.regret) == (-1, 0, 0, 0)
    for have, other in ((want, broken), (broken, want)):
        assert logits(have, other, 0.5).first == 2
    near = want + np.float32(0.1) * (np.arange(4) == 3)[:, None]
    assert logits(near, broken, 1e-3).first == 2


def one(x: float) -> Array:
    return np.array([x, 1.0], np.float32)


def seen(step: str, inputs: Outputs, outputs: Outputs, define: Outputs | None = None) -> TracedStep:
    """Returns a traced step that read and left these values; `define` is what it should leave."""
    ports = {name: name for name in outputs}
    return TracedStep("verify", step, "linear", inputs, outputs, ports, lambda: define or {}, 1e-3)


def walked(steps: list[TracedStep], other: Outputs, monkeypatch: pytest.MonkeyPatch) -> GraphCheck:
    """Check a verify of these steps against a reference with the values `other`."""
    monkeypatch.setattr(compare, "walks", lambda model: {"verify": lambda tokens, at: None})
    state = SimpleNamespace(tensors={"state": None}, reset=lambda: None)
    session = cast("Session", SimpleNamespace(model=SimpleNamespace(state=state)))
    show = cast("StepTracer", SimpleNamespace(steps=lambda call: iter(steps)))
    return walk(session, show, "verify", (1,), 0, other, 0.01, Silent())


def test_the_first_step_to_part_is_named_beside_the_one_furthest_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = [
        seen("same", {"a": one(0)}, {"b": one(0), "next.state": one(9)}),
        seen("parts", {"b": one(0), "state": one(9)}, {"c": one(0.02)}),
        seen("parts too", {"c": one(0.02)}, {"d": one(0.5)}),
        seen("nearer again", {"d": one(0.5)}, {"e": one(0.1)}),
    ]
    other = {name: one(0) for name in ("a", "b", "c", "d", "e", "state", "next.state")}
    found = walked(steps, other, monkeypatch)
    assert found.parts
    assert found.furthest
    assert (found.parts.step, found.furthest.step) == ("parts", "parts too")
    assert (found.operators, found.wrong) == (4, None)


def test_a_walk_ends_at_the_first_step_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [
        seen(name, {}, {"y": one(0.5)}, {"y": one(want)})
        for name, want in (("right", 0.5), ("wrong", 0), ("worse", -5))
    ]
    found = walked(steps, {}, monkeypatch)
    assert found.wrong
    assert (found.wrong.step, found.operators, found.furthest) == ("wrong", 2, None)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(DType.BF16, 1.0), (DType.F16, 1.0), (DType.FP8, 1.0), (DType.FP8, 2.0**-9)],
)
def test_a_value_may_be_its_neighbour_and_none_further(dtype: DType, value: float) -> None:
    want = np.array([value, 0.0]).astype(dtype.numpy)
    near = want.view(f"u{dtype.bytes}")
    for distance, same in ((1, True), (2, False)):
        have = near.copy()
        have[0] += distance
        assert (differ(have.view(dtype.numpy), want, 0.0) is None) == same
        assert (differ(want, have.view(dtype.numpy), 0.0) is None) == same


def test_an_infinity_is_not_the_one_of_the_other_sign() -> None:
    up, down, none = (np.array([[1.0, x]], np.float32) for x in (np.inf, -np.inf, np.nan))
    for have, want in ((up, down), (down, up), (none, up), (up, none)):
        assert differ(have, want, 1.0) == (float("inf"), (0, 1))
        assert logits(have, want, 1.0).first == 0
        assert differ(have, have, 0.0) is None
