"""Forced answers: the ids are committed by ordinary cycles of the assumed number of rows."""

from __future__ import annotations

import pytest
from support.loop_models import DEAD, answer, oracle, prompt, session

from thor_dflash.runtime.decoding.proposers import Proposer
from thor_dflash.runtime.policies.forced_answer import ForcedAnswer
from thor_dflash.runtime.session import Request

IDS = prompt(45, 9)
ASK = Request(prompt=prompt(24, 2), max_tokens=len(IDS))


def hist(rows: float | None, drafter: Proposer) -> list[int]:
    """The cycles that committed 1, 2, ... rows."""
    s = session(layers=2)
    assert answer(s, ASK, drafter, (ForcedAnswer(IDS, rows),)) == list(IDS)
    return list(s.report().spec.accept_hist)


@pytest.mark.parametrize(
    ("rows", "cycles"),
    [(1.0, {1: 45}), (4.5, {4: 5, 5: 5}), (3.5, {3: 7, 4: 6}), (16.0, {16: 2, 13: 1})],
)
def test_an_assumed_acceptance_is_met_on_average(rows: float, cycles: dict[int, int]) -> None:
    for drafter in (DEAD, oracle(IDS)):
        assert {i + 1: n for i, n in enumerate(hist(rows, drafter)) if n} == cycles


def test_the_drafter_decides() -> None:
    assert hist(None, oracle(IDS))[15] == 2
    assert hist(None, DEAD)[0] == 45 - IDS.count(0)
