"""The protocol over sockets, with a mock or a backend whose steps a test permits."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
import zmq
from support.waiting import until

from thor_dflash.config.serving import ServeConfig
from thor_dflash.core.errors import EngineError
from thor_dflash.serving.planner.mock_backend import PLAN, MockBackend

SMALL = {"op": "plan", "prompt": "x"}


# --- control while a plan decodes


def test_control_is_answered_while_the_engine_stands(house: Any) -> None:
    server, held = house.held()
    peer, other = house.peer(server), house.peer(server)
    peer.send(**SMALL, id="p")
    assert held.waiting.wait(20)
    for op in ("hello", "ping", "health", "stats", "prefix.list"):
        assert other.ask(op=op, id=op)["id"] == op
        assert peer.ask(op=op, id=op)["id"] == op, "its own connection is served, too"
    health = other.ask(op="health", id="h")
    assert (health["state"], health["ready"], health["running"]) == ("busy", True, 1)
    assert other.ask(op="validate", id="v", prompt="two words")["prompt_tokens"] == 2
    held.let()
    assert peer.final("p")["status"] == "ok"


# --- framing


def test_every_kind_of_client_is_answered_in_its_own_way(house: Any) -> None:
    server = house.mock()
    req = house.peer(server, zmq.REQ)
    assert req.ask(op="ping", id="1")["id"] == "1"
    correlated = house.peer(server, zmq.REQ, REQ_RELAXED=1, REQ_CORRELATE=1)
    assert correlated.ask(op="ping", id="2")["id"] == "2"
    dealer = house.peer(server)
    dealer.socket.send_multipart([b"hop", b"", msgspec.msgpack.encode({"op": "ping", "id": "3"})])
    frames = dealer.socket.recv_multipart()
    assert frames[:2] == [b"hop", b""]
    assert msgspec.msgpack.decode(frames[2])["id"] == "3", "in the encoding of the request"
    dealer.socket.send_multipart([b'{"op":"ping","id":"4"}'])
    (bare,) = dealer.socket.recv_multipart()
    assert msgspec.json.decode(bare)["id"] == "4", "no empty frame: none in the answer"
    dealer.socket.send_multipart([b"hop", b'{"op":"ping","id":"5"}'])
    hop, bare = dealer.socket.recv_multipart()
    assert (hop, msgspec.json.decode(bare)["id"]) == (b"hop", "5"), "nor by a proxy"
    dealer.socket.send_multipart([b"", b"{", b"}"])
    assert dealer.receive()["code"] == "bad_request"


@pytest.mark.parametrize(("hops", "type_"), [(6, "result"), (7, "error")])
def test_a_chain_of_proxies_has_an_end(house: Any, hops: int, type_: str) -> None:
    peer = house.peer(house.mock())
    peer.socket.send_multipart([*[b"hop"] * hops, b"", b'{"op":"ping","id":"1"}'])
    assert msgspec.json.decode(peer.socket.recv_multipart()[-1])["type"] == type_


class Panic(BaseException):
    """Like a panic in a Rust library, which is no Exception."""


@pytest.mark.parametrize(
    ("fault", "code"),
    [(EngineError("/secret/decode.onnx must run"), "engine_fault"),
     (ZeroDivisionError("/secret"), "internal"), (Panic("/secret"), "internal")],
)  # fmt: skip
@pytest.mark.parametrize("at", ["prepare", "start", "validate"])
def test_a_fault_is_logged_and_its_text_not_sent(
    house: Any, monkeypatch: pytest.MonkeyPatch, at: str, fault: BaseException, code: str
) -> None:
    def fail(*args: object) -> Any:
        raise fault

    backend = MockBackend(ServeConfig())
    monkeypatch.setattr(backend, at, fail)
    peer = house.peer(house.serve(backend))
    reply = peer.ask(op="validate" if at == "validate" else "plan", prompt="x", id="p")
    assert (reply["code"], reply["retryable"]) == (code, code == "engine_fault")
    health = peer.ask(op="health", id="h")
    assert bool(health["error"]) == (at == "start")
    assert "secret" not in str((reply, health))
    assert any("/secret" in line for line in house.log)
    house.log[:] = [line for line in house.log if "Traceback" not in line]


# --- plans


def test_a_stream_is_numbered_and_ends_with_the_whole(house: Any) -> None:
    peer = house.peer(house.mock())
    peer.send(**SMALL, id="p", stream="all", **{"return": ["plan", "text", "thinking"]})
    events = [peer.receive()]
    while events[-1]["type"] == "chunk":
        events.append(peer.receive())
    assert [event["seq"] for event in events] == list(range(len(events)))
    joined = {
        kind: "".join(e["text"] for e in events[:-1] if e["kind"] == kind)
        for kind in ("text", "thinking")
    }
    last = events[-1]
    assert joined["text"].rstrip() == last["text"]
    assert joined["thinking"] == last["thinking"]
    steps = [event for event in events[:-1] if event["kind"] == "step"]
    assert [step["step"] for step in steps] == last["plan"]["steps"]
    assert [step["index"] for step in steps] == [0, 1, 2]


def test_a_plan_that_its_schema_refuses_is_an_error(house: Any) -> None:
    peer = house.peer(house.mock())
    wrong: dict[str, Any] = {"type": "object", "required": ["colour"]}
    reply = peer.ask(**SMALL, id="p", json_schema=wrong)
    assert (reply["status"], reply["plan_valid"]) == ("error", False)
    reply = peer.ask(**SMALL, id="q", json_schema={"type": "object", "required": ["goal"]})
    assert (reply["status"], reply["plan_valid"]) == ("ok", True)
    assert peer.ask(**SMALL, id="r", json_schema={"type": 5})["code"] == "schema_invalid"
    far = {"$ref": "http://127.0.0.1:9/schema.json"}
    assert peer.ask(**SMALL, id="s", json_schema=far)["code"] == "schema_unsupported"


# --- real time


def test_the_latest_plan_of_a_session_wins(house: Any) -> None:
    held, peer = house.running(**SMALL, id="a")
    peer.send(**SMALL, id="b")
    peer.send(**SMALL, id="c")
    assert peer.final("b")["code"] == "preempted", "it never began"
    held.let(1)
    assert peer.final("a")["code"] == "preempted"
    held.let()
    assert peer.final("c")["status"] == "ok"
    assert held.started == ["a", "c"]
    assert held.ended == ["preempted", None]


def test_a_plan_that_is_refused_takes_no_other_plans_place(house: Any) -> None:
    server, held = house.held()
    held.rates.cycle_ms = 1e6
    peer = house.peer(server)
    peer.send(**SMALL, id="a", session="arm", generation=1)
    assert held.waiting.wait(20)
    peer.send(**SMALL, id="b", session="arm", generation=1, preempt="none")
    newer = {"op": "plan", "session": "arm", "generation": 9, "priority": 9, "preempt": "lower"}
    for fields, code in (
        ({"prompt": "x", "json_schema": {"type": 7}}, "schema_invalid"),
        ({"prompt": "x " * 9000}, "prompt_too_long"),
        ({"prompt": "x", "deadline_ms": 60_000}, "deadline_infeasible"),
    ):
        assert peer.ask(**newer, **fields, id="bad")["code"] == code
    held.let()
    assert peer.final("a")["status"] == "ok"
    assert peer.final("b")["status"] == "ok"
    assert peer.ask(**SMALL, id="c", session="arm", generation=2)["status"] == "ok"


def test_cancel_takes_the_step_under_way_and_no_more(house: Any) -> None:
    server, held = house.held()
    peer = house.peer(server)
    peer.send(**SMALL, id="a", session="arm")
    held.let(3)
    until(lambda: held.steps == 3 and held.waiting.is_set())
    assert peer.ask(op="cancel", id="k", target="a")["cancelled"] is True
    held.let()
    assert peer.final("a")["code"] == "cancelled"
    assert held.steps == 4
    assert peer.ask(op="cancel", id="k", target="a")["cancelled"] is False


def test_cancel_works_from_elsewhere_by_session_alone(house: Any) -> None:
    server, held = house.held()
    peer, other = house.peer(server), house.peer(server, zmq.REQ)
    peer.send(**SMALL, id="a", session="arm")
    assert held.waiting.wait(20)
    peer.send(**SMALL, id="b", session="leg")
    until(lambda: other.ask(op="health", id="h")["waiting"] == 1)
    assert other.ask(op="cancel", id="k", target="b")["cancelled"] is False
    assert other.ask(op="cancel", id="k", target="b", session="arm")["cancelled"] is False
    assert other.ask(op="cancel", id="k", target="b", session="leg")["cancelled"] is True
    assert peer.final("b")["code"] == "cancelled", "at once, from the queue"
    held.let()
    assert peer.final("a")["status"] == "ok"


def test_the_urgent_overtake_and_preempt(house: Any) -> None:
    held, peer = house.running(**SMALL, id="a", session="a")
    peer.send(**SMALL, id="b", session="b", priority=1)
    until(lambda: peer.ask(op="health", id="h")["waiting"] == 1)
    peer.send(**SMALL, id="c", session="c", priority=9, preempt="lower")
    # Plans are checked before validations: once this is answered, both plans are accepted.
    assert peer.ask(op="validate", id="v", prompt="x")["id"] == "v"
    held.let()
    assert peer.final("a")["code"] == "preempted"
    assert peer.final("c")["status"] == "ok"
    assert peer.final("b")["status"] == "ok"


# --- deadlines


def test_a_deadline_that_cannot_be_met_is_refused_with_the_one_that_can(house: Any) -> None:
    server, held = house.held()
    held.rates.cycle_ms = 50.0
    peer = house.peer(server)
    reply = peer.ask(**SMALL, id="a", deadline_ms=20)
    assert reply["code"] == "deadline_infeasible"
    assert reply["min_ms"] > 20
    assert held.steps == 0
    held.let()
    ms = int(reply["min_ms"]) + 2000
    assert peer.ask(**SMALL, id="b", deadline_ms=ms)["type"] == "result"


def test_a_plan_that_is_cut_short_is_whole_as_far_as_it_goes(house: Any) -> None:
    server, held = house.held()
    peer = house.peer(server)
    peer.send(**SMALL, id="a", thinking="off", deadline_ms=400)
    held.let(7)  # of 10: the last of the plan's three steps is not whole
    until(lambda: held.steps == 7 and held.waiting.is_set())
    time.sleep(0.45)
    held.let()
    reply = peer.final("a")
    assert (reply["status"], reply["finish_reason"]) == ("partial", "deadline")
    whole = msgspec.json.decode(PLAN)
    kept = reply["plan"]["steps"]
    assert 1 <= len(kept) < 3
    assert kept == whole["steps"][: len(kept)]
    assert reply["plan_valid"] is True
    assert held.steps == 8


def test_where_half_a_plan_is_none_the_deadline_is_an_error(house: Any) -> None:
    server, held = house.held()
    peer = house.peer(server)
    peer.send(**SMALL, id="a", deadline_ms=300, on_deadline="error")
    held.let(2)
    until(lambda: held.steps == 2 and held.waiting.is_set())
    time.sleep(0.35)
    held.let()
    assert peer.final("a")["code"] == "deadline"


def test_a_deadline_passes_in_the_queue_without_the_engine(house: Any) -> None:
    held, peer = house.running(**SMALL, id="a", session="a")
    assert peer.ask(**SMALL, id="b", session="b", deadline_ms=100)["code"] == "deadline"
    assert held.started == ["a"]
