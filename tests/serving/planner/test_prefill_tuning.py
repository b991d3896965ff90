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
from thor_dflash.serving.planner.latency_model import LatencyModel
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
    assert bool(log) == (limit < 16), "a limit that no size keeps is told"


def test_what_a_step_takes_is_measured_where_it_takes_most(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    prefill = ModelRunner.prefill

    def seen(model: ModelRunner, tokens: Any, observe: bool) -> None:
        lengths.append(model.state.length + len(tokens))
        assert observe
        prefill(model, tokens, observe)

    monkeypatch.setattr(ModelRunner, "prefill", seen)
    assert prefill_tuning.choose_chunk(session.model, SIZES, 0.0, lambda line: None) > 0
    assert session.model.state.length == 0, "the sequence is empty again"
    assert len(lengths) == (1 + prefill_tuning.REPEATS) * len(SIZES)
    assert set(lengths) == {session.model.limit}


def test_a_step_takes_what_those_after_the_first_do(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, takes = 0.0, [100.0, 2.0, 5.0, 1.0]  # seconds; the first step of a size warms it up

    def prefill(model: ModelRunner, tokens: Any, observe: bool) -> None:
        nonlocal now
        now += takes.pop(0)

    monkeypatch.setattr(ModelRunner, "prefill", prefill)
    monkeypatch.setattr(prefill_tuning.time, "perf_counter", lambda: now)
    monkeypatch.setattr(prefill_tuning, "REPEATS", 3)
    assert prefill_tuning.step_ms(session.model, 8, 0) == 2000.0
    assert takes == []


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


def test_the_bound_holds_the_slowest_prefill_step_from_the_first_moment() -> None:
    rates = LatencyModel(worst_step_ms=90.0)
    assert rates.bound_ms() == 180.0
    rates.cycle(20.0, 4, thinking=False)
    assert rates.bound_ms() == 180.0
    rates.cycle(200.0, 4, thinking=False)
    assert rates.bound_ms() == 400.0, "and what was slower than that"


def test_a_size_that_was_named_stays_and_is_told_where_it_is_too_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stored prefixes are whole steps of that size, so two starts of a server must use the same."""
    monkeypatch.setattr(prefill_tuning, "step_ms", lambda model, rows, start: 10.0 * rows)
    own, *others = SIZES
    config, log = EngineConfig(threads=1, chunk=16), list[str]()
    named = open_session(package(own, tuple(others)), config, Silent(), choose=True)
    backend = SessionBackend(named, ServeConfig(cancel_ms=100), log.append)
    backend.warm()
    assert named.model.chunk == backend.about.prefill_chunk == 16
    assert named.model.step_sizes == backend.rates.step_sizes == (8, 16)
    assert any("a prefill step of 16 tokens takes 160 ms" in line for line in log)
    backend.close()


def test_idle_time_is_part_of_every_step_from_the_first_moment(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_tuning, "step_ms", lambda model, rows, start: 3.0 * rows)
    log: list[str] = []
    backend = Kept(session, ServeConfig(cancel_ms=2060, yield_us=2_000_000), log.append)
    backend.warm()
    rates = backend.rates
    assert backend.about.prefill_chunk == 16, "2048 ms, where 64 rows would take 2192"
    assert rates.worst_step_ms == 2048
    assert rates.bound_ms() >= 4096
    assert rates.step_ms.keys() == {8, 16}
    assert 2000 < min(rates.cycle_ms, *rates.step_ms.values()) < 4000
    assert rates.min_ms(17, 32, whole=False) > 4000, "a prefill step, and a cycle or more"
    assert log == []
    Kept(session, ServeConfig(cancel_ms=100, yield_us=2_000_000), log.append).warm()
    assert "8 tokens takes 2024 ms (2000 of them serve.yield_us) and serve.cancel_ms" in log[0]


def test_hello_publishes_size_and_bound(
    session: Session, house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_tuning, "step_ms", lambda model, rows, start: 3.0 * rows)
    server = house.serve(Kept(session, ServeConfig(cancel_ms=100), house.log.append))
    hello = house.peer(server).ask(op="hello", id="h")
    assert hello["limits"]["prefill_chunk"] == 16, "48 ms, where 64 rows would take 192"
    assert hello["limits"]["cancel_bound_ms"] >= 96


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
