"""Which committed tokens are shown, and when a request is over: a truth table, then requests."""

from __future__ import annotations

import pytest
from support.coverings import some
from support.loop_models import answer, oracle, prompt, session

from thor_dflash.runtime.decoding.loop import visible_tokens
from thor_dflash.runtime.decoding.proposers import NoDrafter
from thor_dflash.runtime.session import Request

EOS = 99


@pytest.mark.parametrize(
    ("before", "tokens", "stop", "most", "shown", "finish"),
    [
        (3, [10, 11, 12, 13], [EOS], 10, [10, 11, 12, 13], ""),
        (5, [10, 11, EOS, 13], [EOS], 10, [10, 11], "stop"),
        (5, [EOS, 11], [EOS], 10, [], "stop"),
        (8, [10, 11, 12, 13], [EOS], 10, [10, 11], "length"),
        (5, [10, EOS, 12], [], 10, [10, EOS, 12], ""),
        (9, [EOS], [EOS], 10, [], "stop"),
        (9, [10], [EOS], 10, [10], "length"),
        (0, [EOS], [EOS], 1, [], "stop"),
    ],
)
def test_truth_table(
    before: int, tokens: list[int], stop: list[int], most: int, shown: list[int], finish: str
) -> None:
    assert visible_tokens(before, tokens, stop, most) == (tuple(shown), finish)


@pytest.mark.parametrize(
    "at", some([0, 1, 7, 14, 15, 16, 17, 30], [0, 14, 15, 16], pytest.mark.slow)
)
def test_a_stop_token_anywhere_in_a_block(at: int) -> None:
    s = session()
    truth = answer(s, Request(prompt=prompt(40, 1), max_tokens=60), NoDrafter())
    stop = truth[at]
    first = truth.index(stop)
    request = Request(prompt=prompt(40, 1), max_tokens=60, stop=frozenset({stop}))
    for proposer in (NoDrafter(), oracle(truth)):
        assert answer(s, request, proposer) == truth[:first]
        assert s.report().finish == "stop"
        assert s.report().completion_tokens == first + 1
        # The stop token ends the commit: what follows it in the block is no part of the sequence.
        assert s.model.state.length == 40 + first


@pytest.mark.parametrize("most", [1, 2, 15, 16, 17, 33])
def test_max_tokens_is_exact(most: int) -> None:
    s = session()
    truth = answer(s, Request(prompt=prompt(40, 1), max_tokens=60), NoDrafter())
    got = answer(s, Request(prompt=prompt(40, 1), max_tokens=most), oracle(truth))
    assert got == truth[:most]
    assert s.report().finish == "length"
    assert s.model.state.length == 39 + most
