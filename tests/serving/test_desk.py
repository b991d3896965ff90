"""The desk by itself: how it answers letters and the posts of other threads, also where a peer or a
thread is gone.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from thor_dflash.errors import Code, PlanError
from thor_dflash.serve_config import ServeConfig
from thor_dflash.serving.desk import ENVELOPE, Desk, Hands
from thor_dflash.serving.door import Letter
from thor_dflash.serving.events import Events
from thor_dflash.serving.life import Life
from thor_dflash.serving.mock import MockBackend
from thor_dflash.serving.schedule import Job
from thor_dflash.serving.wire import Chunk
from thor_dflash.serving.work import Checked, Ended, Said

BACKEND = MockBackend(ServeConfig())


class Door:
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
def door() -> Door:
    return Door()


@pytest.fixture
def life() -> Life:
    return Life(10.0, BACKEND)


@pytest.fixture
def desk(door: Any, life: Life) -> Desk:
    hands = Hands(check=lambda job: None, run=lambda job: None, keep=print, stop=print)
    return Desk(door, ServeConfig(), life, hands, None, print, Events(""))


def asked(desk: Desk, id: str, **fields: object) -> Job:
    body = msgspec.json.encode({"op": "plan", "id": id, "prompt": "x", "session": "s", **fields})
    desk.letter(Letter((b"peer", b"", body), 7))
    return desk.books.jobs()[-1]


def checked(desk: Desk, job: Job) -> None:
    request: Any = job.request
    desk.posted(Checked(job, BACKEND.prepare(request, None)))


def test_a_plan_whose_peer_is_found_gone_by_what_it_displaces_is_gone_too(
    desk: Desk, door: Door
) -> None:
    jobs = [asked(desk, id, preempt="none") for id in "ab"]
    for job in jobs:
        checked(desk, job)
    assert [job.state for job in jobs] == ["running", "queued"]
    last = asked(desk, "c", preempt="same_session")
    door.gone = True
    checked(desk, last)
    assert [job.state for job in (*jobs, last)] == ["running", "left", "left"]
    assert desk.books.jobs() == jobs[:1]
    assert [reply["id"] for reply in door.sent] == ["b"], "nobody hears of the others"


def test_an_engine_that_outlives_another_thread_is_told_to_stop(desk: Desk, door: Door) -> None:
    job = asked(desk, "a")
    checked(desk, job)
    assert (job.state, job.stop) == ("running", None)
    desk.fail()
    assert job.stop == "cancelled", "its thread is waited for, and nobody hears its plan"
    assert [reply["code"] for reply in door.sent] == ["engine_fault"]


def test_while_it_drains_questions_are_answered_and_new_work_is_not(
    desk: Desk, door: Door, life: Life
) -> None:
    life.draining = True
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
        desk.letter(Letter((b"peer", b"", body), 7))
    assert [reply.get("code") for reply in door.sent] == [None] * 6 + ["draining"] * 4


@pytest.mark.parametrize(
    ("body", "id"),
    [(b'{"op":"plan"}', "-"), (b'{"op":"drain"}', "-"), (b'{"v":2,"op":"ping"}', "-"),
     (b'{"op":"ping","id":null}', None), (b"{", None), (b"?", None)],
)  # fmt: skip
def test_a_refusal_names_a_request_without_an_id_as_its_answer_would(
    desk: Desk, door: Door, body: bytes, id: str | None
) -> None:
    desk.letter(Letter((b"peer", b"", body), 7))
    (reply,) = door.sent
    assert (reply["type"], reply["id"]) == ("error", id)


@pytest.mark.parametrize(("hops", "answer"), [(ENVELOPE - 1, "result"), (ENVELOPE, "error")])
def test_as_many_hops_as_may_be_are_answered_and_no_more(
    desk: Desk, door: Door, hops: int, answer: str
) -> None:
    envelope = (*(b"hop%d" % i for i in range(hops)), b"")
    desk.letter(Letter((*envelope, b'{"op":"ping","id":"p"}'), 7))
    assert [reply["type"] for reply in door.sent] == [answer]


def test_a_slow_reader_may_lose_words_and_no_step(desk: Desk, door: Door) -> None:
    job = asked(desk, "a")
    checked(desk, job)
    for kind in ("progress", "thinking", "text", "step"):
        desk.posted(Said(job, Chunk(kind=kind)))  # type: ignore[arg-type]
    assert door.droppable == [True, True, True, False]


@pytest.mark.parametrize(
    ("code", "told"), [("engine_fault", True), ("internal", True), ("deadline", False)]
)
def test_health_tells_the_last_fault_of_a_plan_and_no_refusal(
    desk: Desk, life: Life, code: Code, told: bool
) -> None:
    job = asked(desk, "a")
    checked(desk, job)
    desk.posted(Ended(job, PlanError(code, "what happened")))
    assert life.health(0, 0)["error"] == ("what happened" if told else None)


def test_a_deadline_is_judged_by_what_its_check_has_left_of_it(desk: Desk, door: Door) -> None:
    job = asked(desk, "a", deadline_ms=60_000)
    job.arrived -= 59.0
    job.deadline = time.monotonic() + 1.0
    request: Any = job.request
    prepared = replace(BACKEND.prepare(request, None), min_ms=30_000.0)
    desk.posted(Checked(job, prepared))
    assert [reply["code"] for reply in door.sent] == ["deadline_infeasible"]
    assert door.sent[0]["min_ms"] >= 59_000 + 30_000, "counted from the arrival, as deadline_ms is"
