"""max_answer limits the answer alone: it costs the thinking no cycle."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.constrained_model import asked, text
from support.constrained_model import session as model
from support.loop_models import oracle

from thor_dflash.plugins.accept.record import Record
from thor_dflash.runtime.decoding.block import Block, DecodeProgress
from thor_dflash.runtime.decoding.proposers import NoDrafter
from thor_dflash.runtime.policies.limits import TokenLimit
from thor_dflash.runtime.policies.thinking_budget import ThinkingBudget
from thor_dflash.runtime.text.thinking import Marks

MARKS = Marks(open=1, close=2)
LIMIT = TokenLimit(max_tokens=100, max_answer=3)


def record(*tokens: int) -> Record:
    return Record(len(tokens), -1, 0, 0, 0, tokens, tokens)


@pytest.mark.parametrize(
    ("tokens", "rows"),
    [((7, 8, 9, 7, 8), 5), ((7, 2, 8, 9), 4), ((7, 2, 8, 9, 7, 8), 5), ((2, 7, 8, 9, 7, 8), 4)],
)
def test_a_block_that_thinks_is_whole_up_to_the_answers_limit(
    tokens: tuple[int, ...], rows: int
) -> None:
    progress = DecodeProgress((5, MARKS.open), MARKS)
    assert LIMIT.shape(progress, Block(cap=16)).cap == 16
    assert LIMIT.judge(progress, Block(cap=16), record(*tokens)) == rows


def test_an_answer_is_capped_to_what_is_left() -> None:
    progress = DecodeProgress((5, MARKS.open), MARKS)
    progress.commit((7, MARKS.close, 8))
    assert LIMIT.shape(progress, Block(cap=16)).cap == 2
    assert LIMIT.judge(progress, Block(cap=2), record(8, 9)) == 2


@pytest.mark.parametrize("most", [1, 2, 7])
def test_an_answer_that_begins_within_a_block_ends_at_its_limit(most: int) -> None:
    """Through a session, which adds the limit, with drafts that are right for longer."""
    close = text().end_think
    assert close is not None
    request = replace(asked(True), max_tokens=60)
    ends = lambda: (ThinkingBudget(5, (close,)),)  # noqa: E731
    truth = [t for c in model().run(request, NoDrafter(), ends()) for t in c.tokens]
    short = replace(request, max_answer=most)
    got = [t for c in model().run(short, oracle(truth), ends()) for t in c.tokens]
    assert got == truth[: 5 + 1 + most]
    assert model().report().finish == "length"
