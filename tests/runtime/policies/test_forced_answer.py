"""Forced answers: the ids are committed by ordinary cycles of the assumed number of rows."""

from __future__ import annotations

import pytest
from support.loop_models import DEAD, answer, oracle, prompt, session

from thor_dflash.runtime.decoding.proposers import Proposer
from thor_dflash.runtime.policies.forced_answer import ForcedAnswer
from thor_dflash.runtime.session import Request

IDS = prompt(23, 9)
ASK = Request(prompt=prompt(24, 2), max_tokens=len(IDS))


def hist(rows: float | None, drafter: Proposer) -> list[int]:
    """The cycles that committed 1, 2, ... rows."""
    s = session()
    assert answer(s, ASK, drafter, (ForcedAnswer(IDS, rows),)) == list(IDS)
    return list(s.report().spec.accept_hist)


@pytest.mark.parametrize(
    ("rows", "cycles"),
    [(1.0, {1: 23}), (4.5, {4: 3, 5: 2, 1: 1}), (3.5, {3: 3, 4: 3, 2: 1}), (16.0, {16: 1, 7: 1})],
)
def test_an_assumed_acceptance_is_met_on_average(rows: float, cycles: dict[int, int]) -> None:
    drafter = oracle(IDS) if rows == 3.5 else DEAD  # which does not matter
    assert {i + 1: n for i, n in enumerate(hist(rows, drafter)) if n} == cycles


def test_the_drafter_decides() -> None:
    assert hist(None, oracle(IDS))[15] == 1
    assert hist(None, DEAD)[0] == 23 - IDS.count(0)
