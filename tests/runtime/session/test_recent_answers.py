"""Answers kept for later drafts: the newest of each session, within a bound."""

from __future__ import annotations

import pytest

from thor_dflash.runtime.session import recent_answers
from thor_dflash.runtime.session.recent_answers import RecentAnswers


def test_the_newest_of_a_session_with_the_end_of_their_prompts() -> None:
    kept = RecentAnswers(each=2)
    for n in range(3):
        kept.keep("a", range(100), [200 + n])
    assert kept.of("a") == tuple((*range(92, 100), 200 + n) for n in (1, 2))
    kept.drop("a")
    kept.drop("b")
    assert (kept.of("a"), kept.of("b")) == ((), ())
    kept.keep("b", (), [])
    assert kept.of("b") == ()
    kept.keep("b", [1, -(2**40), 2], [3])
    assert kept.of("b") == ((1, 2, 3),), "without the tokens of an image"


def test_the_least_recently_used_session_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_answers, "TOKENS", 10)
    kept = RecentAnswers()
    for name in "ab":
        kept.keep(name, (), [1, 2, 3, 4])
    kept.of("a")
    kept.keep("c", (), [5, 6, 7, 8])
    assert (len(kept.of("a")), len(kept.of("b")), len(kept.of("c"))) == (1, 0, 1)
    kept.keep("c", (), [0] * 11)
    assert len(kept.of("c")) == 1, "one that is too long is not kept"
    for _ in range(9):
        kept.keep("c", (), [5, 6, 7, 8])
    assert len(kept.of("c")) == 2
    assert kept.of("a") == ()


def test_answers_that_no_request_uses_expire() -> None:
    now = [0.0]
    kept = RecentAnswers(clock=lambda: now[0])
    assert kept.expire(10) is None
    for name in "ab":
        kept.keep(name, (), [1])
    now[0] = 6
    kept.of("a")
    assert kept.expire(10) == 4
    now[0] = 10
    assert kept.expire(10) == 6
    assert (kept.of("b"), len(kept.of("a"))) == ((), 1), "its use counts, and that of now"
    now[0] = 20
    assert kept.expire(10) is None


def test_none_are_kept_if_none_are_asked_for() -> None:
    kept = RecentAnswers(each=0)
    kept.keep("a", (), [1])
    assert kept.of("a") == ()
