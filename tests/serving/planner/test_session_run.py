"""One request on a session: how it ended, what is told of it, and what the rates learn."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from queue import SimpleQueue

import pytest
from msgspec import structs

from thor_dflash.config.serving import ServeConfig
from thor_dflash.runtime.measure import power
from thor_dflash.runtime.measure.power import PowerSampler, Sensor
from thor_dflash.runtime.session import Session, TokenChunk
from thor_dflash.serving.client import PlanRequest
from thor_dflash.serving.planner.backend import drive
from thor_dflash.serving.planner.power_meter import PowerMeter
from thor_dflash.serving.planner.session_backend import SessionBackend
from thor_dflash.serving.planner.session_run import SessionRun
from thor_dflash.serving.protocol import messages
from thor_dflash.serving.protocol.codec import JSON
from thor_dflash.serving.server.scheduler import Job, Peer
from thor_dflash.serving.server.workers import Heartbeat, JobDone, WorkerEvent, run_engine

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


def told(
    backend: SessionBackend,
    ask: PlanRequest,
    *chunks: TokenChunk,
    watch: PowerSampler | None = None,
) -> SessionRun:
    """A run of a session that yields just these chunks."""
    prepared, it = backend.prepare(ask, None), backend
    said = (chunk for chunk in chunks)
    return SessionRun(it.session, it.tokenizer, it.rates, prepared, said, watch or PowerSampler([]))


def test_the_mode_of_acceptance_reaches_the_loop(backend: Kept) -> None:
    for mode in ("strict", "relaxed_thinking"):
        result = plan(backend, structs.replace(THINKS, accept_mode=mode))
        assert result.accept_mode == mode
        notes = {note.what for note in backend.session.report().notes}
        assert ("relaxed" in notes) == (mode == "relaxed_thinking")


@pytest.mark.parametrize(
    ("ask", "said", "finish"),
    [
        (THINKS, "I think", "thinking_exhausted"),
        (THINKS, "I think.</think>", "thinking_exhausted"),
        (THINKS, "I think.</think>{", "length"),
        (ANSWERS, "{", "length"),
        (ANSWERS, "<think>I think", "length"),
    ],
)
def test_an_answer_that_never_came_is_thinking_exhausted(
    backend: Kept, ask: PlanRequest, said: str, finish: str
) -> None:
    run = told(backend, ask, TokenChunk(tuple(backend.tokenizer.encode(said)), "length"))
    result = ended(run)
    assert (result.finish_reason, result.status) == (finish, "partial")


def test_what_was_held_back_is_streamed_at_the_end(backend: Kept) -> None:
    half = backend.tokenizer.encode("{ü")[:-1]
    assert backend.tokenizer.decode(half) == "{�"
    chunks: list[messages.Chunk] = []
    ask = structs.replace(ANSWERS, stream="text", parts=("text",))
    *chunks, result = drive(told(backend, ask, TokenChunk(tuple(half), "stop")))
    assert "".join(chunk.text or "" for chunk in chunks) == result.text == "{�"


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
    run = told(backend, ANSWERS, TokenChunk((5, 6), finish))  # type: ignore[arg-type]
    run.step()
    assert run.result(stop).finish_reason == (finish or stop)  # type: ignore[arg-type]
    rates = backend.rates
    assert (rates.e2e_ms > 0, rates.answer_tokens < 160) == (learns, learns)


def test_a_run_that_never_stepped_tells_nothing_of_the_one_before(backend: Kept) -> None:
    assert plan(backend, ANSWERS).spec
    result = backend.start(backend.prepare(ANSWERS, None), None).result("cancelled")
    assert result.spec is None
    assert result.timings
    times = (result.timings.prefill_ms, result.timings.ttft_ms, result.timings.decode_ms)
    assert times == (0, 0, 0)


def test_a_plan_tells_the_energy_of_each_rail(backend: Kept, tmp_path: Path) -> None:
    (tmp_path / "uw").write_text("60000000")
    sensor = Sensor("VIN", tmp_path / "uw", tmp_path, tmp_path)
    start = time.perf_counter()
    watch = PowerSampler([sensor], period=0.001)
    run = told(backend, ANSWERS, TokenChunk((5, 6), "stop"), watch=watch)
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


def test_no_energy_of_half_a_plan(backend: Kept, tmp_path: Path) -> None:
    (tmp_path / "uw").write_text("60000000")
    watch = PowerSampler([Sensor("VIN", tmp_path / "uw", tmp_path, tmp_path)], period=0.001)
    run = told(backend, ANSWERS, TokenChunk((5, 6), "stop"), watch=watch)
    while len(watch._samples) < 3:
        time.sleep(0.001)
    (tmp_path / "uw").write_text("gone")
    assert watch._thread
    watch._thread.join(20)
    run.step()
    timings = run.result(None).timings
    assert timings
    assert timings.energy_j is None


def test_a_machine_without_sensors_tells_no_energy_and_runs_no_thread(backend: Kept) -> None:
    backend._meter = PowerMeter([], print)
    count = threading.active_count()
    run = backend.start(backend.prepare(ANSWERS, None), None)
    assert threading.active_count() == count
    timings = ended(run).timings
    assert timings
    assert timings.energy_j is None


def test_a_sensor_that_hangs_is_waited_for_once(
    backend: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(power, "PATIENCE", 0.05)
    os.mkfifo(pipe := tmp_path / "power")  # a reader blocks until somebody writes
    log: list[str] = []
    backend._meter = PowerMeter([Sensor("VIN", pipe, pipe, pipe)], log.append)
    count = threading.active_count()
    for _ in range(3):
        timings = plan(backend, ANSWERS).timings
        assert timings
        assert timings.energy_j is None
    assert threading.active_count() == count + 1, "the thread of the first plan"
    assert log == ["a power sensor hangs: plans have no energy_j until the server's next start"]
    pipe.write_text("1")  # lets that thread end


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
