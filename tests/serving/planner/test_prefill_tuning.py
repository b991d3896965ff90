"""How long a cancel waits: a prefill step chosen by its time, and the bound in hello."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support.constrained_model import package

from thor_dflash.config.engine import EngineConfig
from thor_dflash.config.serving import ServeConfig
from thor_dflash.core.progress import Silent
from thor_dflash.runtime.decoding.model_runner import ModelRunner
from thor_dflash.runtime.session import Session, open_session
from thor_dflash.serving.planner import prefill_tuning, session_backend
from thor_dflash.serving.planner.session_backend import SessionBackend

SIZES = (16, 8, 64)


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    own, *others = SIZES
    path = package(own, tuple(others))
    it = open_session(path, EngineConfig(threads=1), Silent(), choose=True)
    yield it
    it.close()


class Kept(SessionBackend):
    """A backend that leaves its session, which the tests share, open."""

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("limit", "rows", "took"), [(1000.0, 64, 128.0), (128.0, 64, 128.0), (127.0, 16, 32.0),
                                (20.0, 8, 16.0), (3.0, 8, 16.0)]
)  # fmt: skip
def test_the_largest_step_that_a_cancel_can_wait_for(
    session: Session, limit: float, rows: int, took: float
) -> None:
    log: list[str] = []
    got = prefill_tuning.choose_chunk(
        session.model, SIZES, limit, log.append, lambda model, rows, start: 2.0 * rows
    )
    assert (session.model.chunk, got) == (rows, took)
    assert bool(log) == (limit < 16), "a limit that no size keeps is reported"
    for line in log:  # with what to type
        assert "thor-dflash build ... --set 'build.chunks=[4]' --force" in line
        assert "thor-dflash serve ... --set serve.cancel_ms=16" in line


def test_what_a_prompt_takes_is_predicted_from_the_sizes_of_its_steps(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_tuning, "step_ms", lambda model, rows, start: 2.0 * rows)
    monkeypatch.setattr(session_backend, "step_ms", lambda model, rows, start: 100.0 * rows + start)
    backend = Kept(session, ServeConfig(cancel_ms=32))
    backend.warm()
    assert backend.rates.step_sizes == (8, 16), "64 rows are more than a cancel waits for"
    assert backend.rates.worst_step_ms == 32
    assert backend.rates.step_ms[8] == 800, "which no step of the self-test had"
    assert backend.rates.step_ms[16] < 1600, "and this had"
    assert backend.rates.step_ms.keys() == {8, 16}
    assert backend.rates.prefill_ms(16 * 3 + 6) == 3 * backend.rates.step_ms[16] + 800


def test_a_cancel_in_the_prefill_takes_the_step_under_way_and_no_more(
    session: Session, house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_tuning, "step_ms", lambda model, rows, start: 3.0 * rows)
    server = house.serve(Kept(session, ServeConfig(cancel_ms=24), house.log.append))
    assert session.model.chunk == 8
    begun, go = threading.Event(), threading.Semaphore(0)
    steps: list[int] = []
    prefill = ModelRunner.prefill

    def held(model: ModelRunner, tokens: Any, observe: bool) -> None:
        steps.append(len(tokens))
        begun.set()
        assert go.acquire(timeout=20)
        prefill(model, tokens, observe)

    monkeypatch.setattr(ModelRunner, "prefill", held)
    peer = house.peer(server)
    peer.send(op="plan", id="p", prompt="word " * 60, thinking="off", max_tokens=4)
    assert begun.wait(20)
    assert peer.ask(op="cancel", id="c", target="p")["cancelled"] is True
    assert peer.silent(), "the step under way is not over"
    go.release(100)
    assert peer.final("p")["code"] == "cancelled"
    assert len(steps) == 1, "eight steps more would have been due"
