"""A session used by two threads: a later request ends the earlier one, and no answer is wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
from support.loop_models import DEAD, answer, prompt, session

from thor_dflash.core.errors import TransactionError
from thor_dflash.runtime.decoding.proposers import NoDrafter
from thor_dflash.runtime.engines.protocol import Call
from thor_dflash.runtime.session import Request, Session

MOMENT_S = 0.2
"""Time in which another thread would get into a step, if it could."""


class Meeting:
    """Runs `other` in a thread of its own, begun while a step of this thread runs. If it gets as
    far as the engine, it stays there until this thread's step has ended.
    """

    def __init__(self, s: Session, monkeypatch: pytest.MonkeyPatch) -> None:
        self._inside, self._ended = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self.met = False
        kind, run = type(s.model.engine), type(s.model.engine).run

        def meet(engine: object, calls: Sequence[Call]) -> None:
            if threading.current_thread() is self._thread:
                self._inside.set()
                self._ended.wait()
            elif self._thread is not None and not self._thread.ident:
                self._thread.start()
                self.met = self._inside.wait(MOMENT_S)
            run(engine, calls)  # type: ignore[arg-type]

        monkeypatch.setattr(kind, "run", meet)

    def between(self, step: Callable[[], object], other: Callable[[], object]) -> None:
        """Run a step, and the other during it."""
        self._thread = threading.Thread(target=lambda: (other(), self._inside.set()))
        step()
        self._ended.set()
        self._thread.join()


@pytest.mark.parametrize("steps", [0, 2])
def test_a_request_of_another_thread_waits_for_the_step(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    s, asked = session(), Request(prompt=prompt(50, 2), max_tokens=12)
    truth = answer(s, asked, NoDrafter())
    first = s.run(Request(prompt=prompt(40, 1), max_tokens=40), DEAD)
    for _ in range(steps):
        next(first)
    found: list[list[int]] = []
    meeting = Meeting(s, monkeypatch)
    meeting.between(lambda: next(first), lambda: found.append(answer(s, asked, NoDrafter())))
    assert found == [truth]
    assert not meeting.met
    with pytest.raises(TransactionError, match="must have the state to itself"):
        next(first)


def test_a_session_that_another_thread_closes_ends_its_step_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    s, within = session(), list[bool]()
    first = s.run(Request(prompt=prompt(40, 1), max_tokens=40), DEAD)
    meeting = Meeting(s, monkeypatch)
    running = [False]
    run = type(s.model.engine).run

    def noted(engine: object, calls: Sequence[Call]) -> None:
        running[0] = True
        run(engine, calls)  # type: ignore[arg-type]
        running[0] = False

    monkeypatch.setattr(type(s.model.engine), "run", noted)
    monkeypatch.setattr(type(s.model.engine), "close", lambda _: within.append(running[0]))
    meeting.between(lambda: next(first), s.close)
    assert within == [False]
    first.close()


def test_an_abandoned_request_waits_for_no_step_that_does_not_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its finaliser may run in a thread that holds what that step waits for."""
    monkeypatch.setattr("thor_dflash.runtime.session.session.FINALISER_S", 0.01)
    s = session()
    chunks = s.run(Request(prompt=prompt(20), max_tokens=20), NoDrafter())
    next(chunks)
    held, done = threading.Event(), threading.Event()

    def step() -> None:
        with s.model.alone:
            held.set()
            done.wait(20)

    thread = threading.Thread(target=step)
    thread.start()
    held.wait()
    chunks.close()  # type: ignore[attr-defined]
    assert not done.is_set()
    report = s.report()
    done.set()
    thread.join()
    assert (report.finish, report.phases_ms) == ("cancelled", {})
    assert answer(s, Request(prompt=prompt(20), max_tokens=20), NoDrafter())
