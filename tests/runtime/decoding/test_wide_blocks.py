"""Blocks wider than the drafter's: what a text has behind its last draft is verified, too, and the
answer is the plain one.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Literal

import pytest
from support.loop_models import ForcedRuns, answer, prompt, session

from thor_dflash.config.decode import SamplingConfig
from thor_dflash.runtime.decoding.draft_chooser import DraftChooser
from thor_dflash.runtime.decoding.lookup import LookupTexts
from thor_dflash.runtime.decoding.mtp import own_drafter
from thor_dflash.runtime.decoding.proposers import NoDrafter
from thor_dflash.runtime.session import Request, Session

Kind = Literal["dflash", "dflash2", "mtp"]
ONE = Request(prompt=prompt(40, seed=1), max_tokens=32)
DRAWN = replace(ONE, sampling=SamplingConfig(temperature=1.0, seed=5))
REJECTION = replace(ONE, sampling=SamplingConfig(temperature=1.0, seed=5, acceptance="rejection"))
DRAFTS = {"dflash": 15, "dflash2": 7, "mtp": 3}


@cache
def wide(kind: Kind) -> Session:
    block = 20 if kind == "dflash" else 16
    second = kind == "dflash2"
    layers = ("sliding_attention",) * 2 if second else ("sliding_attention", "full_attention")
    return session(mtp=kind == "mtp", second=second, draft_layers=layers, block=block)


@pytest.mark.parametrize(
    ("kind", "request_"),
    [
        ("dflash2", ONE),
        pytest.param("mtp", DRAWN, marks=pytest.mark.slow),
        pytest.param("dflash2", DRAWN, marks=pytest.mark.slow),
        pytest.param("dflash2", REJECTION, marks=pytest.mark.slow),
        pytest.param("dflash", ONE, marks=pytest.mark.slow),
        pytest.param("dflash", DRAWN, marks=pytest.mark.slow),
        pytest.param("mtp", REJECTION, marks=pytest.mark.slow),
    ],
)
def test_a_text_goes_on_behind_the_drafts(kind: Kind, request_: Request) -> None:
    """Ids are forced in the places of some drafts, and in those of all; the text is behind them."""
    s, drafts = wide(kind), DRAFTS[kind]
    runs = ForcedRuns({3: (9, 8), 9: (7,) * drafts})
    truth = answer(s, request_, NoDrafter(), (runs,))
    text = (*request_.prompt[-4:], *(t if i % 5 or i > 8 else 3 for i, t in enumerate(truth)))
    chooser = DraftChooser(
        own_drafter(s.manifest), request_.prompt, lambda: LookupTexts(session=(text,))
    )
    assert answer(s, request_, chooser, (runs,)) == truth
    report = s.report()
    assert any(one.tail and one.tail.accepted for one in report.drafts)
    counts = report.spec.sources.values()
    assert sum(one.accepted for one in counts) == report.spec.accepted
    assert sum(one.drafted for one in counts) == report.spec.drafted
    assert answer(s, request_, own_drafter(s.manifest), (runs,)) == truth
