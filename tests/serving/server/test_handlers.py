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
from thor_dflash.core.errors import PlanError
from thor_dflash.serving.planner.mock_backend import MockBackend
from thor_dflash.serving.protocol.messages import Chunk
from thor_dflash.serving.server.event_log import EventLog
from thor_dflash.serving.server.handlers import RequestHandlers, ServerActions
from thor_dflash.serving.server.lifecycle import Lifecycle
from thor_dflash.serving.server.scheduler import Job
from thor_dflash.serving.server.worker_messages import ChunkReady, FileWritten, JobChecked, JobDone
from thor_dflash.serving.transport.router_socket import ReceivedMessage

BACKEND = MockBackend(ServeConfig())


class Fixture:
    """Handlers without threads and sockets; `sent` keeps the replies. While `gone`, no peer can be
    reached.
    """

    def __init__(self) -> None:
        self.gone = False
        self.sent: list[dict[str, Any]] = []
        self.droppable: list[bool] = []
        self.lifecycle = Lifecycle(10.0, BACKEND)
        actions = ServerActions(
            decode=print, check=lambda job: None, run=lambda job: None, write=print, stop=print
        )
        router: Any = self
        self.handlers = RequestHandlers(
            router, ServeConfig(), self.lifecycle, actions, None, print, EventLog("")
        )

    def send(self, envelope: object, body: bytes, *, droppable: bool) -> str:
        self.sent.append(msgspec.json.decode(body))
        self.droppable.append(droppable)
        return "gone" if self.gone else "sent"

    def receive(self, body: bytes | None = None, **fields: object) -> None:
        text = msgspec.json.encode(fields) if body is None else body
        self.handlers.handle_message(ReceivedMessage((b"peer", b"", text), 7))

    def plan(self, id: str, **fields: object) -> Job:
        """A plan that has arrived and is being checked."""
        self.receive(**{"op": "plan", "id": id, "prompt": "x", "session": "s", **fields})
        return self.handlers.scheduler.jobs()[-1]

    def check(self, job: Job) -> Job:
        request: Any = job.request
        self.handlers.handle_event(JobChecked(job, BACKEND.prepare(request, None)))
        return job

    def pinned(self) -> Job:
        """A prefix that the engine holds, while its file is being written."""
        self.receive(op="prefix.put", id="p", prefix_id="x", system="y")
        (job,) = self.handlers.scheduler.jobs()
        self.handlers.handle_event(JobDone(job, {"prefix_id": "x"}))
        assert job.state == "writing"
        return job

    def replies(self, field: str) -> list[tuple[Any, Any]]:
        return [(reply["id"], reply.get(field)) for reply in self.sent]


@pytest.fixture
def it() -> Fixture:
    return Fixture()


def test_a_plan_whose_peer_is_found_gone_by_what_it_displaces_is_gone_too(it: Fixture) -> None:
    jobs = [it.check(it.plan(id, preempt="none")) for id in "ab"]
    assert [job.state for job in jobs] == ["running", "queued"]
    last = it.plan("c", preempt="same_session")
    it.gone = True
    it.check(last)
    assert [job.state for job in (*jobs, last)] == ["running", "left", "left"]
    assert it.handlers.scheduler.jobs() == jobs[:1]
    assert [reply["id"] for reply in it.sent] == ["b"], "the others get no reply"


def test_while_it_drains_state_is_shown_and_new_work_refused(it: Fixture) -> None:
    it.lifecycle.draining = True
    for op in ("hello", "ping", "health", "stats", "prefix.list"):
        it.receive(op=op)
    it.receive(op="cancel", target="a")
    for fields in (
        {"op": "plan", "prompt": "x"},
        {"op": "validate", "prompt": "x"},
        {"op": "prefix.put", "prefix_id": "a", "system": "x"},
        {"op": "prefix.drop", "prefix_id": "a"},
        {"op": "session.drop", "session": "a"},
    ):
        it.receive(**fields)
    assert [reply.get("code") for reply in it.sent] == [None] * 6 + ["draining"] * 5


def test_a_slow_reader_may_lose_text_and_no_step(it: Fixture) -> None:
    job = it.check(it.plan("a"))
    for kind in ("progress", "thinking", "text", "step"):
        it.handlers.handle_event(ChunkReady(job, Chunk(kind=kind)))  # type: ignore[arg-type]
    assert it.droppable == [True, True, True, False]


def test_a_deadline_is_judged_by_what_its_check_has_left_of_it(it: Fixture) -> None:
    job = it.plan("a", deadline_ms=60_000)
    job.arrived -= 59.0
    job.deadline = time.monotonic() + 1.0
    request: Any = job.request
    prepared = replace(BACKEND.prepare(request, None), min_ms=30_000.0)
    it.handlers.handle_event(JobChecked(job, prepared))
    assert it.replies("code") == [("a", "deadline_infeasible")]
    assert it.sent[0]["min_ms"] >= 59_000 + 30_000, "from the arrival, as deadline_ms"


def test_a_prefix_whose_file_is_being_written_is_done_and_cannot_be_cancelled(it: Fixture) -> None:
    job = it.pinned()
    it.receive(op="cancel", id="c", target="p")
    it.handlers.give_up()
    it.receive(op="health", id="h")
    assert (it.sent[1]["running"], it.sent[1]["waiting"]) == (0, 0)
    assert not it.handlers.idle, "its file may still fail"
    it.handlers.handle_event(FileWritten(job, {"prefix_id": "x"}))
    assert it.replies("type") == [("c", "ack"), ("h", "result"), ("p", "result")]
    assert it.sent[0]["cancelled"] is False
    assert it.handlers.idle


def test_a_client_that_left_gets_no_reply_for_a_prefix_or_a_plan(it: Fixture) -> None:
    prefix = it.pinned()
    it.handlers.connection_closed(7)
    it.handlers.handle_event(FileWritten(prefix, {"prefix_id": "x"}))
    job, checked = it.check(it.plan("a")), it.plan("b", preempt="none")
    it.handlers.connection_closed(7)
    it.handlers.handle_event(ChunkReady(job, Chunk(kind="text", text="a word")))
    assert (job.state, job.stop) == ("running", "cancelled")
    it.check(checked)
    assert checked.state == "left"
    it.handlers.handle_event(JobDone(job, PlanError("cancelled", "it was stopped")))
    assert it.sent == []
    assert it.handlers.idle


def test_a_plan_whose_text_cannot_be_encoded_is_answered_once_and_stopped(it: Fixture) -> None:
    job = it.check(it.plan("a"))
    it.handlers.handle_event(ChunkReady(job, Chunk(kind="text", text="\udcff")))
    assert (job.state, job.stop) == ("running", "cancelled")
    it.handlers.handle_event(ChunkReady(job, Chunk(kind="text", text="more")))
    it.handlers.handle_event(JobDone(job, PlanError("cancelled", "it was stopped")))
    assert it.replies("code") == [("a", "internal")]
    assert it.handlers.stats.refused == {"internal": 1}


@pytest.mark.parametrize(("end", "code"), [("give_up", "draining"), ("fail", "engine_fault")])
def test_pending_requests_are_refused_at_the_end(it: Fixture, end: str, code: str) -> None:
    job = it.check(it.plan("a"))
    it.receive(op="validate", id="v", prompt="x")
    it.receive(op="prefix.drop", id="d", prefix_id="x")
    assert not it.handlers.idle
    getattr(it.handlers, end)()
    running = [] if end == "give_up" else [("a", code)]
    assert it.replies("code") == [*running, ("v", code), ("d", code)]
    assert job.stop == "cancelled", "its thread is waited for"
