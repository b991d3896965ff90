"""When `check` calls two values different, and a room's definition what it is."""

from __future__ import annotations

import json

import numpy as np
import pytest

from thor_dflash.calib.check import define
from thor_dflash.calib.check.compare import Report, logits
from thor_dflash.calib.check.judge import Drift, differ, jumps
from thor_dflash.plugins import HEAD
from thor_dflash.tensors import DType
from thor_dflash.verbs.check import as_table


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


def test_a_jump_is_more_than_what_was_read() -> None:
    assert jumps(Drift("s", 0.0, 0.1), 0.01)
    assert not jumps(Drift("s", 0.05, 0.1), 0.01)
    assert not jumps(Drift("s", 0.0, 0.005), 0.01)


def test_a_head_is_defined_in_parts_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(define, "PART", 40)
    for case in HEAD.cases(np.random.default_rng(5)):
        a = HEAD.complete(case.attributes)
        want = HEAD.reference(case.inputs, a)
        got = define.define(HEAD, case.inputs, a, want)
        for name, value in want.items():
            assert differ(got[name], value, 1e-6) is None, (case.name, name)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("strange", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_no_numbers_is_judged_by_itself(strange: float) -> None:
    want = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    broken = want.copy()
    broken[2, 3] = strange
    same = logits(broken, broken, 0.0)
    assert (same.first, same.worst, same.choices, same.regret) == (-1, 0, 0, 0)
    for have, other in ((want, broken), (broken, want)):
        assert logits(have, other, 0.5).first == 2
    near = want + np.float32(0.1) * (np.arange(4) == 3)[:, None]
    assert logits(near, broken, 1e-3).first == 2


def test_a_report_of_what_is_no_number_is_json_all_the_same() -> None:
    want = np.ones((2, 4), np.float32)
    broken = np.where(np.arange(2)[:, None] == 1, np.nan, want)
    report = Report(logits(broken, want, 0.5), ((3, float("inf")),), (), ())
    told = json.loads(json.dumps(as_table(report), allow_nan=False))
    assert (told["right"], told["logits"]["worst"], told["taps"]) == (False, None, [[3, None]])
    assert told["logits"]["first"] == 1
