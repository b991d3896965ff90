"""Validations and drops of prefixes: how many may be unanswered, that none is begun for a client
that left, and that plans are checked before them.
"""

from __future__ import annotations

import threading
from queue import PriorityQueue
from typing import Any

import pytest
from support.waiting import until

from thor_dflash.config.serving import ServeConfig
from thor_dflash.core.errors import PlanError
from thor_dflash.serving.planner.mock_backend import MockBackend
from thor_dflash.serving.protocol import messages
from thor_dflash.serving.protocol.codec import JSON
from thor_dflash.serving.server import worker_messages, workers
from thor_dflash.serving.server.pending import MAX_PER_CLIENT, MAX_TOTAL
from thor_dflash.serving.server.scheduler import Peer, job_of
from thor_dflash.serving.server.worker_messages import PendingRequest

VALIDATE, DROP = messages.Validate(id="v", prompt="x"), messages.PrefixDrop(id="d", prefix_id="x")


def peer(name: int) -> Peer:
    return Peer((b"%d" % name, b""), JSON, fd=name)


class Slow(MockBackend):
    """A mock backend that records what it is asked, and whose validations and drops wait for the
    test.
    """

    def __init__(self) -> None:
        super().__init__(ServeConfig())
        self.asked: list[str] = []
        self.begun, self.go = threading.Event(), threading.Event()

    def prepare(self, ask: Any, left_ms: Any, scope: str = "", *images: Any) -> Any:
        self.asked.append(ask.id)
        return super().prepare(ask, left_ms, scope, *images)

    def validate(self, request: Any) -> Any:
        self.asked.append(request.id)
        self.begun.set()
        assert self.go.wait(20)
        return super().validate(request)

    def drop(self, prefix_id: str) -> bool:
        assert self.go.wait(20)
        return super().drop(prefix_id)


@pytest.mark.parametrize("op", ["validate", "prefix.drop"])
def test_who_asks_for_too_much_at_once_is_answered_busy(house: Any, op: str) -> None:
    backend = Slow()
    server = house.serve(backend)
    given = {"prompt": "x"} if op == "validate" else {"prefix_id": "x"}
    peers = [house.peer(server) for _ in range(MAX_TOTAL // MAX_PER_CLIENT + 1)]
    for peer in peers[:-1]:
        for n in range(MAX_PER_CLIENT):
            peer.send(op=op, id=f"{n}", **given)
        reply = peer.ask(op=op, id="over", **given)
        assert (reply["id"], reply["code"], reply["retryable"]) == ("over", "busy", True)
    reply = peers[-1].ask(op=op, id="one", **given)
    assert (reply["id"], reply["code"]) == ("one", "busy")
    assert reply["retry_after_ms"] > 0
    backend.go.set()
    assert {peers[0].receive()["type"] for _ in range(MAX_PER_CLIENT)} == {"result"}


def test_a_request_of_a_client_that_left_is_not_begun(house: Any) -> None:
    backend = Slow()
    server = house.serve(backend)
    gone, other = house.peer(server), house.peer(server)
    for name in "abc":
        gone.send(op="validate", id=name, prompt="x")
    assert backend.begun.wait(20)
    taken = server._handlers._pending._requests
    until(lambda: len(taken) == 3)  # messages of two clients would come in any order
    other.send(op="validate", id="d", prompt="x")
    gone.close()
    while not all(request.abandoned for request in taken[:3]):
        assert other.ask(op="ping", id="p")["id"] == "p"
    backend.go.set()
    assert other.final("d")["type"] == "result"
    assert backend.asked == ["a", "d"]


def test_plans_are_checked_first_and_all_before_the_end() -> None:
    backend, checks = Slow(), PriorityQueue[worker_messages.CheckItem]()
    backend.go.set()
    asks = [job_of(peer(1), messages.PlanRequest(id=name, prompt="x")) for name in "ab"]
    items = [
        PendingRequest(peer(1), VALIDATE),
        asks[0],
        None,
        PendingRequest(peer(2), VALIDATE),
        asks[1],
    ]
    for order, item in enumerate(items):
        checks.put(worker_messages.check_item(order, item))
    workers.run_checks(backend, checks, lambda post: None, print)
    assert backend.asked == ["a", "b", "v", "v"]


def test_a_prompt_that_cannot_fit_is_not_encoded(
    session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from thor_dflash.serving.planner.session_backend import SessionBackend

    backend = SessionBackend(session, ServeConfig())
    long = "cup " * 250_000
    requests = {
        "prompt": lambda: backend.validate(messages.Validate(prompt=long)),
        "system": lambda: backend.pin(
            messages.PrefixPut(prefix_id="a", system=long), lambda: False
        ),
    }
    few, limit = backend.validate(messages.Validate(prompt="cup")), session.model.limit
    monkeypatch.setattr(session.tokenizer, "encode", lambda text: pytest.fail("it was encoded"))
    for field, ask in requests.items():
        with pytest.raises(PlanError, match=rf"must be <= {limit} tokens") as caught:
            ask()
        assert (caught.value.code, caught.value.field) == ("prompt_too_long", field)
    with pytest.raises(PlanError, match=r"prompt must be <=") as caught:
        backend.prepare(messages.PlanRequest(prompt=long), None)
    assert caught.value.code == "prompt_too_long"
    assert few["prompt_tokens"] > 0
