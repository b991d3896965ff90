"""One request on a session: how it ended, what is reported of it, and what the rates learn."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from queue import SimpleQueue

import pytest
from msgspec import structs

from thor_dflash.config.serving import ServeConfig
from thor_dflash.runtime.measure.power import PowerSampler, Sensor
from thor_dflash.runtime.session import Session, TokenChunk
from thor_dflash.serving.client import PlanRequest
from thor_dflash.serving.planner.backend import drive
from thor_dflash.serving.planner.session_backend import SessionBackend
from thor_dflash.serving.planner.session_run import SessionRun
from thor_dflash.serving.protocol import messages
from thor_dflash.serving.protocol.codec import JSON
from thor_dflash.serving.server.heartbeat import Heartbeat
from thor_dflash.serving.server.scheduler import Job, Peer
from thor_dflash.serving.server.worker_messages import JobDone, WorkerEvent
from thor_dflash.serving.server.workers import run_engine

THINKS = PlanRequest(prompt="Pick the mug.", thinking="on", thinking_budget=24, parts=("timings",))
ANSWERS = structs.replace(THINKS, thinking="off", thinking_budget=None)
LONG_AGO_S = 1000.0


class Kept(SessionBackend):
    """A backend that leaves its session, which the tests share, open, and does no self-test."""

    def warm(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def backend(session: Session) -> Kept:
    it = Kept(session, ServeConfig(thinking_budget=24, max_tokens=20))
    plan(it, ANSWERS)
    it.rates.e2e_ms, it.rates.answer_tokens = 0.0, 160.0
    return it


def plan(backend: SessionBackend, ask: PlanRequest) -> messages.Result:
    run = backend.start(backend.prepare(ask, None), None)
    return ended(run)


def ended(run: SessionRun) -> messages.Result:
    *_, result = drive(run)
    assert isinstance(result, messages.Result)
    return result


def reported(
    backend: SessionBackend,
    ask: PlanRequest,
    *chunks: TokenChunk,
    watch: PowerSampler | None = None,
) -> SessionRun:
    """A run of a session that yields just these chunks."""
    prepared, it = backend.prepare(ask, None), backend
    written = (chunk for chunk in chunks)
    return SessionRun(
        it.session, it.tokenizer, it.rates, prepared, written, watch or PowerSampler([])
    )


def test_the_mode_of_acceptance_reaches_the_loop(backend: Kept) -> None:
    for mode in ("strict", "relaxed_thinking"):
        result = plan(backend, structs.replace(THINKS, accept_mode=mode))
        assert result.accept_mode == mode
        notes = {note.what for note in backend.session.report().notes}
        assert ("relaxed" in notes) == (mode == "relaxed_thinking")


@pytest.mark.parametrize(
    ("ask", "written", "finish"),
    [
        (THINKS, "I think", "thinking_exhausted"),
        (THINKS, "I think.</think>", "thinking_exhausted"),
        (THINKS, "I think.</think>{", "length"),
        (ANSWERS, "{", "length"),
        (ANSWERS, "<think>I think", "length"),
    ],
)
def test_an_answer_that_never_came_is_thinking_exhausted(
    backend: Kept, ask: PlanRequest, written: str, finish: str
) -> None:
    run = reported(backend, ask, TokenChunk(tuple(backend.tokenizer.encode(written)), "length"))
    result = ended(run)
    assert (result.finish_reason, result.status) == (finish, "partial")


@pytest.mark.parametrize(
    ("finish", "stop", "learns"),
    [
        ("stop", None, True),
        ("length", None, False),
        ("grammar_dead_end", None, False),
        ("", "cancelled", False),
        ("", "deadline", False),
        ("", "preempted", False),
    ],
)
def test_the_rates_learn_from_whole_plans_only(
    backend: Kept, finish: object, stop: object, learns: bool
) -> None:
    run = reported(backend, ANSWERS, TokenChunk((5, 6), finish))  # type: ignore[arg-type]
    run.step()
    assert run.result(stop).finish_reason == (finish or stop)  # type: ignore[arg-type]
    rates = backend.rates
    assert (rates.e2e_ms > 0, rates.answer_tokens < 160) == (learns, learns)


def test_the_rates_learn_the_best_acceptance_of_an_answer(backend: Kept) -> None:
    """Counted from its first token, without the thinking, whichever way it ends."""
    close = tuple(backend.tokenizer.encode("</think>"))
    backend.rates.best_len = math.inf
    many = (TokenChunk((5,) * 10, ""), TokenChunk((5,) * 12, ""), TokenChunk((5,) * 2, ""))
    run = reported(backend, THINKS, TokenChunk((5, 6), ""), TokenChunk((*close, 5), ""), *many * 2)
    for chunks, best in ((4, math.inf), (1, math.inf), (1, 35 / 5), (1, 47 / 6), (1, 47 / 6)):
        for _ in range(chunks):
            run.step()
        assert backend.rates.best_len == best


def test_a_plan_tells_the_energy_of_each_rail(backend: Kept, tmp_path: Path) -> None:
    (tmp_path / "uw").write_text("60000000")
    sensor = Sensor("VIN", tmp_path / "uw", tmp_path, tmp_path)
    start = time.perf_counter()
    watch = PowerSampler([sensor], period=0.001)
    run = reported(backend, ANSWERS, TokenChunk((5, 6), "stop"), watch=watch)
    time.sleep(0.05)
    run.step()
    result = run.result(None)
    most = 60 * (time.perf_counter() - start)
    assert result.timings
    assert result.timings.energy_j
    assert 60 * 0.05 <= result.timings.energy_j.pop("VIN") <= most
    assert result.timings.energy_j == {}
    assert watch._thread
    assert not watch._thread.is_alive()


def test_times_of_a_plan_that_waited_count_from_its_arrival(backend: Kept) -> None:
    job = Job(
        request=THINKS,
        peer=Peer((b"peer",), JSON),
        session="",
        arrived=time.monotonic() - LONG_AGO_S,
        state="running",
        prepared=backend.prepare(THINKS, None),
    )
    inbox, posts = SimpleQueue[Job | None](), list[WorkerEvent]()
    inbox.put(job)
    inbox.put(None)
    thread = threading.Thread(
        target=run_engine, args=(lambda: backend, inbox, posts.append, Heartbeat(), print)
    )
    thread.start()
    thread.join()
    (result,) = [post.outcome for post in posts if isinstance(post, JobDone)]
    assert isinstance(result, messages.Result)
    times = result.timings
    assert times
    assert times.ttfa_ms is not None
    assert 1e3 * LONG_AGO_S <= times.queue_ms < times.ttft_ms <= times.ttfa_ms <= times.e2e_ms
