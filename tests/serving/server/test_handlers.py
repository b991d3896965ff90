"""The handlers alone: replies to messages and to events of the worker threads, also where a peer
or a thread is gone.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from thor_dflash.config.serving import ServeConfig
from thor_dflash.core.errors import Code, PlanError
from thor_dflash.serving.planner.mock_backend import MockBackend
from thor_dflash.serving.protocol.messages import Chunk
from thor_dflash.serving.server.event_log import EventLog
from thor_dflash.serving.server.handlers import RequestHandlers, ServerActions
from thor_dflash.serving.server.lifecycle import RETRY_MS, Lifecycle
from thor_dflash.serving.server.scheduler import Job
from thor_dflash.serving.server.workers import ChunkReady, FileWritten, JobChecked, JobDone
from thor_dflash.serving.transport.router_socket import ReceivedMessage

BACKEND = MockBackend(ServeConfig())


class FakeRouter:
    """Stands in for the sockets and keeps what is sent. While `gone`, no peer can be reached."""

    def __init__(self) -> None:
        self.gone = False
        self.sent: list[dict[str, Any]] = []
        self.droppable: list[bool] = []

    def send(self, envelope: object, body: bytes, *, droppable: bool) -> str:
        self.sent.append(msgspec.json.decode(body))
        self.droppable.append(droppable)
        return "gone" if self.gone else "sent"


@pytest.fixture
def router() -> FakeRouter:
    return FakeRouter()


@pytest.fixture
def lifecycle() -> Lifecycle:
    return Lifecycle(10.0, BACKEND)


@pytest.fixture
def handlers(router: Any, lifecycle: Lifecycle) -> RequestHandlers:
    actions = ServerActions(check=lambda job: None, run=lambda job: None, write=print, stop=print)
    return RequestHandlers(router, ServeConfig(), lifecycle, actions, None, print, EventLog(""))


def receive(handlers: RequestHandlers, body: bytes) -> None:
    handlers.handle_message(ReceivedMessage((b"peer", b"", body), 7))


def asked(handlers: RequestHandlers, id: str, **fields: object) -> Job:
    body = msgspec.json.encode({"op": "plan", "id": id, "prompt": "x", "session": "s", **fields})
    receive(handlers, body)
    return handlers.scheduler.jobs()[-1]


def checked(handlers: RequestHandlers, job: Job) -> None:
    request: Any = job.request
    handlers.handle_event(JobChecked(job, BACKEND.prepare(request, None)))


def test_a_plan_whose_peer_is_found_gone_by_what_it_displaces_is_gone_too(
    handlers: RequestHandlers, router: FakeRouter
) -> None:
    jobs = [asked(handlers, id, preempt="none") for id in "ab"]
    for job in jobs:
        checked(handlers, job)
    assert [job.state for job in jobs] == ["running", "queued"]
    last = asked(handlers, "c", preempt="same_session")
    router.gone = True
    checked(handlers, last)
    assert [job.state for job in (*jobs, last)] == ["running", "left", "left"]
    assert handlers.scheduler.jobs() == jobs[:1]
    assert [reply["id"] for reply in router.sent] == ["b"], "nobody hears of the others"


def test_while_it_drains_questions_are_answered_and_new_work_is_not(
    handlers: RequestHandlers, router: FakeRouter, lifecycle: Lifecycle
) -> None:
    lifecycle.draining = True
    looks = ("hello", "ping", "health", "stats", "prefix.list", "cancel")
    wants = ("plan", "validate", "prefix.put", "prefix.drop")
    given: dict[str, dict[str, str]] = {
        "cancel": {"target": "a"},
        "plan": {"prompt": "x"},
        "validate": {"prompt": "x"},
        "prefix.put": {"prefix_id": "a", "system": "x"},
        "prefix.drop": {"prefix_id": "a"},
    }
    for op in (*looks, *wants):
        body = msgspec.json.encode({"op": op, **given.get(op, {})})
        receive(handlers, body)
    assert [reply.get("code") for reply in router.sent] == [None] * 6 + ["draining"] * 4


@pytest.mark.parametrize(
    ("body", "id"),
    [(b'{"op":"plan"}', "-"), (b'{"op":"drain"}', "-"), (b'{"v":2,"op":"ping"}', "-"),
     (b'{"op":"ping","id":null}', None), (b"{", None), (b"?", None)],
)  # fmt: skip
def test_a_refusal_names_a_request_without_an_id_as_its_answer_would(
    handlers: RequestHandlers, router: FakeRouter, body: bytes, id: str | None
) -> None:
    receive(handlers, body)
    (reply,) = router.sent
    assert (reply["type"], reply["id"]) == ("error", id)


def test_a_slow_reader_may_lose_text_and_no_step(
    handlers: RequestHandlers, router: FakeRouter
) -> None:
    job = asked(handlers, "a")
    checked(handlers, job)
    for kind in ("progress", "thinking", "text", "step"):
        handlers.handle_event(ChunkReady(job, Chunk(kind=kind)))  # type: ignore[arg-type]
    assert router.droppable == [True, True, True, False]


@pytest.mark.parametrize(
    ("code", "told"), [("engine_fault", True), ("internal", True), ("deadline", False)]
)
def test_health_tells_the_last_fault_of_a_plan_and_no_refusal(
    handlers: RequestHandlers, lifecycle: Lifecycle, code: Code, told: bool
) -> None:
    job = asked(handlers, "a")
    checked(handlers, job)
    handlers.handle_event(JobDone(job, PlanError(code, "what happened")))
    assert lifecycle.health(0, 0)["error"] == ("what happened" if told else None)


def test_a_deadline_is_judged_by_what_its_check_has_left_of_it(
    handlers: RequestHandlers, router: FakeRouter
) -> None:
    job = asked(handlers, "a", deadline_ms=60_000)
    job.arrived -= 59.0
    job.deadline = time.monotonic() + 1.0
    request: Any = job.request
    prepared = replace(BACKEND.prepare(request, None), min_ms=30_000.0)
    handlers.handle_event(JobChecked(job, prepared))
    assert [reply["code"] for reply in router.sent] == ["deadline_infeasible"]
    assert router.sent[0]["min_ms"] >= 59_000 + 30_000, "from the arrival, as deadline_ms"


def pinned(handlers: RequestHandlers) -> Job:
    """A prefix that the engine holds, while its file is being written."""
    body = msgspec.json.encode({"op": "prefix.put", "id": "p", "prefix_id": "x", "system": "y"})
    receive(handlers, body)
    (job,) = handlers.scheduler.jobs()
    handlers.handle_event(JobDone(job, {"prefix_id": "x"}))
    assert job.state == "writing"
    return job


def test_a_prefix_whose_file_is_being_written_is_done_and_cannot_be_cancelled(
    handlers: RequestHandlers, router: FakeRouter
) -> None:
    job = pinned(handlers)
    handlers.handle_message(
        ReceivedMessage((b"peer", b"", b'{"op":"cancel","id":"c","target":"p"}'), 7)
    )
    handlers.give_up()
    assert not handlers.idle, "its file may still fail"
    handlers.handle_event(FileWritten(job, {"prefix_id": "x"}))
    assert [(reply["id"], reply["type"]) for reply in router.sent] == [
        ("c", "ack"),
        ("p", "result"),
    ]
    assert router.sent[0]["cancelled"] is False
    assert handlers.idle


def test_nobody_is_told_of_a_prefix_or_a_plan_whose_client_left(
    handlers: RequestHandlers, router: FakeRouter
) -> None:
    prefix = pinned(handlers)
    handlers.connection_closed(7)
    handlers.handle_event(FileWritten(prefix, {"prefix_id": "x"}))
    job = asked(handlers, "a")
    checked(handlers, job)
    handlers.connection_closed(7)
    handlers.handle_event(ChunkReady(job, Chunk(kind="text", text="a word")))
    assert (job.state, job.stop) == ("running", "cancelled")
    handlers.handle_event(JobDone(job, PlanError("cancelled", "it was told to stop")))
    assert router.sent == []
    assert handlers.idle


def test_a_plan_whose_words_cannot_be_written_is_answered_once_and_stopped(
    handlers: RequestHandlers, router: FakeRouter
) -> None:
    job = asked(handlers, "a")
    checked(handlers, job)
    handlers.handle_event(ChunkReady(job, Chunk(kind="text", text="\udcff")))
    assert (job.state, job.stop) == ("running", "cancelled")
    handlers.handle_event(ChunkReady(job, Chunk(kind="text", text="more")))
    handlers.handle_event(JobDone(job, PlanError("cancelled", "it was told to stop")))
    assert [(reply["id"], reply["code"]) for reply in router.sent] == [("a", "internal")]
    assert handlers.stats.refused == {"internal": 1}


def test_a_plan_that_left_while_it_was_checked_displaces_nobody(
    handlers: RequestHandlers, router: FakeRouter
) -> None:
    gone = asked(handlers, "a", preempt="same_session")
    handlers.connection_closed(7)
    other = asked(handlers, "b")
    checked(handlers, gone)
    assert (gone.state, other.state, router.sent) == ("left", "preparing", [])


@pytest.mark.parametrize(("end", "code"), [("give_up", "draining"), ("fail", "engine_fault")])
def test_who_waits_for_a_check_or_a_drop_hears_of_the_end(
    handlers: RequestHandlers, router: FakeRouter, end: str, code: str
) -> None:
    for body in (b'{"op":"validate","id":"v","prompt":"x"}',
                 b'{"op":"prefix.drop","id":"d","prefix_id":"x"}'):  # fmt: skip
        receive(handlers, body)
    assert not handlers.idle
    getattr(handlers, end)()
    assert [(reply["id"], reply["code"]) for reply in router.sent] == [("v", code), ("d", code)]
    assert handlers.idle


def test_a_plan_whose_deadline_passes_while_it_waits_is_answered_and_counted(
    handlers: RequestHandlers, router: FakeRouter
) -> None:
    for id, given in (("a", {}), ("b", {"deadline_ms": 1000, "session": "t"})):
        checked(handlers, asked(handlers, id, **given))
    handlers.expire(time.monotonic())
    assert router.sent == []
    handlers.expire(time.monotonic() + 1)
    assert [(reply["id"], reply["code"]) for reply in router.sent] == [("b", "deadline")]
    assert handlers.stats.finished == {"deadline": 1}


@pytest.mark.parametrize(("e2e_ms", "told"), [(9000.0, 9000.0), (1.0, RETRY_MS)])
def test_a_full_queue_names_the_time_of_a_plan(
    handlers: RequestHandlers,
    router: FakeRouter,
    monkeypatch: pytest.MonkeyPatch,
    e2e_ms: float,
    told: float,
) -> None:
    monkeypatch.setattr(BACKEND.rates, "e2e_ms", e2e_ms)
    for n in range(ServeConfig().max_queue + 2):
        asked(handlers, f"{n}", session=f"{n}")
    assert [(reply["code"], reply["retry_after_ms"]) for reply in router.sent] == [("busy", told)]
