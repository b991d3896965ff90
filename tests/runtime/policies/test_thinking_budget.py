"""A thinking budget with any drafter: the answer is the one put together by hand from the thoughts,
the closing message and what follows it, and every phase has drafts.
"""

from __future__ import annotations

from functools import cache

import pytest
from support.coverings import some
from support.loop_models import DEAD, erring
from support.thinking_models import Asked, after, first_seen, oracle, run, thinker

from thor_dflash.core.progress import Silent
from thor_dflash.runtime.decoding.block import Block, DecodeProgress
from thor_dflash.runtime.decoding.proposers import DflashDrafter, NoDrafter, Proposer
from thor_dflash.runtime.measure.score import score
from thor_dflash.runtime.policies.thinking_budget import SoftClose, ThinkingBudget
from thor_dflash.runtime.text.thinking import Marks

NEVER = 511
"""An id this model does not say by itself."""
REPLY = 40


def message(length: int) -> tuple[int, ...]:
    """A closing message of `length` ids: the closing mark alone, or with ids before and after it,
    as in Qwen's hint.
    """
    if length == 1:
        return (NEVER,)
    return (*(i % 200 + 7 for i in range(length - 3)), NEVER, 17, 18)


@cache
def thoughts(count: int = 120) -> list[int]:
    """What the model says if no budget closes its thinking."""
    return after(Asked(NEVER).prompt, count)


@cache
def by_hand(limit: int, close: tuple[int, ...]) -> list[int]:
    """The answer to expect: `limit` thoughts, the message, and what the model says after both."""
    begin = [*thoughts()[:limit], *close]
    return [*begin, *after([*Asked(NEVER).prompt, *begin], REPLY - len(close))]


def asked(limit: int) -> Asked:
    return Asked(NEVER, max_tokens=limit + REPLY)


def proposers(truth: list[int]) -> list[Proposer]:
    """Drafters that are right often, so that blocks end and begin anywhere."""
    return [oracle(truth), erring(truth, 0.2, 3)]


CLOSES = [
    *[(0, 1), (0, 20), (1, 20), (15, 1), (16, 1)],
    *[(16, 20), (17, 20), (23, 1), (24, 20), (31, 20)],
]


@pytest.mark.parametrize(
    ("limit", "length"),
    some(CLOSES, [(0, 20), (15, 1), (16, 20), (17, 20), (23, 1)], pytest.mark.slow),
)
def test_the_close_falls_anywhere_in_a_block(limit: int, length: int) -> None:
    close = message(length)
    want = by_hand(limit, close)
    assert len(want) == limit + REPLY
    slow = [NoDrafter(), DflashDrafter(), DEAD] if (limit, length) == (17, 20) else []
    for proposer in proposers(want) + slow:
        got, report = run(asked(limit), proposer, [ThinkingBudget(limit, close)])
        assert got == want, proposer
        assert report.close == "hard"


@pytest.mark.parametrize("length", [1, 20])
def test_drafts_in_every_phase(length: int) -> None:
    close = message(length)
    want = by_hand(33, close)
    for proposer in (DflashDrafter(), oracle(want)):
        _, report = run(asked(33), proposer, [ThinkingBudget(33, close)])
        assert set(report.phases) == {"thinking", "closing", "answer"}
        assert all(part.drafted > 0 for part in report.phases.values())
    assert sum(part.cycles for part in report.phases.values()) == report.spec.cycles
    assert sum(part.committed for part in report.phases.values()) == len(want)
    assert report.spec.forced == length
    assert report.phases["thinking"].cycles == 3, "33 tokens of an oracle are 3 blocks"
    assert report.phases["closing"].cycles == (1 if length == 1 else 2)


@pytest.mark.parametrize("limit", [1, 16, 31])
def test_a_natural_close_makes_the_budget_inert(limit: int) -> None:
    truth = thoughts()
    for at in {i for start in (0, 3, limit - 2, limit - 1) if (i := _new(start)) < limit}:
        close = truth[at]
        it = Asked(close, max_tokens=50)
        plain = after(it.prompt, 50)
        assert plain[at] == close
        assert close not in plain[:at], "the prompt is another one, but not by then"
        for proposer in proposers(plain):
            got, report = run(it, proposer, [ThinkingBudget(limit, (close, 5, 6))])
            assert got == plain
            assert report.close == "natural"
            assert "closing" not in report.phases


def _new(start: int) -> int:
    return first_seen(thoughts(), max(0, start))


def test_a_natural_close_just_after_comes_too_late() -> None:
    at = _new(20)
    close = (3, 4, thoughts()[at])
    it = Asked(close[-1], max_tokens=at + REPLY)
    got, report = run(it, oracle(thoughts()), [ThinkingBudget(at, close)])
    assert got[at : at + 3] == [*close]
    assert got == run(it, NoDrafter(), [ThinkingBudget(at, close)])[0]
    assert report.close == "hard"


def test_a_message_that_the_last_thought_began_is_not_begun_twice() -> None:
    limit = 21
    close = (thoughts()[limit - 1], 33, NEVER)
    begin = [*thoughts()[:limit], 33, NEVER]
    want = [*begin, *after([*Asked(NEVER).prompt, *begin], REPLY - 2)]
    for proposer in proposers(want):
        assert run(asked(limit), proposer, [ThinkingBudget(limit, close)])[0] == want


@pytest.mark.parametrize("written", [1, 16, 19])
def test_max_tokens_inside_the_message(written: int) -> None:
    close = message(20)
    want = by_hand(18, close)[: 18 + written]
    for proposer in proposers(want):
        it = Asked(NEVER, max_tokens=18 + written)
        assert run(it, proposer, [ThinkingBudget(18, close)])[0] == want


# --- soft


def gaps(tokens: list[int], close: int) -> list[float]:
    """Nats from the best id to `close` after each of the tokens, the last prompt token first."""
    prompt = Asked(close).prompt
    logits = score(thinker(), [*prompt, *tokens], False, Silent())["logits"][len(prompt) - 1 :]
    return [float(row.max() - row[close]) for row in logits]


@pytest.mark.parametrize(("start", "nth"), [(0, 0), (5, 2), (18, 0), (30, 2)])
def test_a_soft_close_is_the_first_near_one(start: int, nth: int) -> None:
    distance = gaps(thoughts()[:40], NEVER)
    margin = sorted(distance[start:40])[nth] + 1e-4
    at = next(i for i in range(start, 40) if distance[i] <= margin)
    begin = [*thoughts()[:at], NEVER]
    it = Asked(NEVER, max_tokens=60)
    want = [*begin, *after([*it.prompt, *begin], 60 - len(begin))]
    for proposer in proposers(want):
        budget = ThinkingBudget(45, message(20), SoftClose(start, margin))
        got, report = run(it, proposer, [budget])
        assert got == want
        assert report.close == "soft"
        assert ("soft", "thinking budget") in {(n.what, n.why) for n in report.notes}


def test_the_first_soft_row_is_the_one_at_the_start() -> None:
    progress = DecodeProgress((1, 2), Marks(2, 3))
    progress.commit((9,) * 10)
    budget = ThinkingBudget(45, message(20), SoftClose(12, 1.0))
    assert budget.shape(progress, Block(cap=4)).soft == (-1, -1, 3, 3)
    assert budget.shape(progress, Block(cap=2)).soft == ()


@pytest.mark.parametrize("at", [18, 32])
def test_a_natural_close_in_front_of_soft_rows_is_natural(at: int) -> None:
    """With so wide a margin a soft row after the mark, in the same block, would close again."""
    at = _new(at)
    it = Asked(thoughts()[at], max_tokens=50)
    for proposer in (NoDrafter(), oracle(thoughts())):
        got, report = run(it, proposer, [ThinkingBudget(45, (NEVER,), SoftClose(at + 1, 1e9))])
        assert got == thoughts()[:50]
        assert report.close == "natural"
        assert "soft" not in {note.what for note in report.notes}
