"""The laws of the loop with a DFlash2 drafter: it changes how fast, never what."""

from __future__ import annotations

from functools import cache

import pytest
from support.loop_models import ForcedRuns, answer, drafts, prompt, session

from thor_dflash.runtime.decoding.proposers import DflashDrafter, NoDrafter, Proposer
from thor_dflash.runtime.session import Request, Session

LAYERS = ("sliding_attention",) * 2
ONE = Request(prompt=prompt(80, seed=1), max_tokens=60)


@cache
def dflash2(geometry: str = "27b", block: int = 0) -> Session:
    return session(geometry, block=block, draft_layers=LAYERS, second=True)


@pytest.mark.parametrize(
    ("geometry", "block"),
    [
        ("27b", 0),
        pytest.param("0.8b", 4, marks=pytest.mark.slow),
        pytest.param("4b", 2, marks=pytest.mark.slow),
    ],
)
def test_its_answer_is_the_plain_answer(geometry: str, block: int) -> None:
    s = dflash2(geometry, block)
    truth = answer(s, ONE, NoDrafter())
    assert answer(s, ONE, DflashDrafter()) == truth
    assert len(set(truth)) > 5


def test_forced_runs_with_any_drafter() -> None:
    """A forced id is the predecessor of the draft behind it, whatever that draft is."""
    s = dflash2()
    policy = ForcedRuns({0: (9, 8, 7), 3: (1,), 20: (5,) * 11})

    def forced(proposer: Proposer) -> list[int]:
        return answer(s, ONE, proposer, (policy,))

    truth = forced(NoDrafter())
    assert truth[:4] == [9, 8, 7, 1]
    assert truth[20:31] == [5] * 11
    assert forced(DflashDrafter()) == truth
    assert forced(drafts(lambda n: [n % 240] * 7)) == truth


def test_a_prefix_goes_on_as_if_it_had_been_read() -> None:
    s = dflash2()
    whole = answer(s, ONE, DflashDrafter())
    spec = s.report().spec
    answer(s, Request(prompt=prompt(70, 5), max_tokens=9), DflashDrafter())
    s.prefixes.put("one", ONE.prompt)
    assert answer(s, ONE, DflashDrafter()) == whole
    assert s.report().spec == spec, "the drafter's rings were not restored"
