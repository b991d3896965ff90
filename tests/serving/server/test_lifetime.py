"""How a server begins and ends, and what becomes of the work of clients that leave."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from support.waiting import until

from thor_dflash.config.serving import ServeConfig
from thor_dflash.core.errors import EngineLost
from thor_dflash.serving.planner.mock_backend import MockBackend
from thor_dflash.serving.server.server import Server

SMALL = {"op": "plan", "prompt": "x"}


# --- clients that go


@pytest.mark.parametrize("stream", [False, "steps"])
def test_work_for_a_client_that_left_is_dropped(house: Any, stream: Any) -> None:
    server, held = house.held()
    peer, other = house.peer(server), house.peer(server)
    for name in "ab":
        peer.send(**SMALL, id=name, session=name, stream=stream)
    assert held.waiting.wait(20)
    until(lambda: other.ask(op="health", id="h")["waiting"] == 1)
    peer.close()
    until(lambda: other.ask(op="health", id="h")["waiting"] == 0)
    held.let()
    until(lambda: held.ended == ["cancelled"])
    assert held.steps == 1
    assert other.ask(**SMALL, id="c")["status"] == "ok"
    assert held.started == ["a", "c"]


def test_a_client_that_comes_back_under_its_name_gets_its_own_answers_only(house: Any) -> None:
    server, held = house.held()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    old, new = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
    for socket in (old, new):
        socket.linger = 0
        socket.routing_id = b"robot"
    old.connect(server.endpoints[0])
    old.send_multipart([b"", msgspec.json.encode({**SMALL, "id": "1"})])
    assert held.waiting.wait(20)
    new.connect(server.endpoints[0])
    new.send_multipart([b"", msgspec.json.encode({"op": "ping", "id": "p"})])
    assert new.poll(20_000)
    assert msgspec.json.decode(new.recv_multipart()[-1])["id"] == "p"
    old.close(0)
    running = server._handlers.scheduler.running
    until(lambda: running.stop)
    held.let()
    until(lambda: len(held.ended) == 1)
    assert held.ended == ["cancelled"]
    assert not new.poll(50), "the other's plan is not its"
    new.close(0)
    context.term()


# --- beginning and end


def test_plans_wait_for_the_self_test(house: Any) -> None:
    loading, warming = threading.Event(), threading.Event()

    class Slow(MockBackend):
        def warm(self) -> None:
            assert warming.wait(20)

    def load() -> MockBackend:
        assert loading.wait(20)
        return Slow(ServeConfig())

    server = house.load(load, ServeConfig(bind=("tcp://127.0.0.1:*",)))
    peer = house.peer(server)
    assert peer.ask(op="health", id="h")["state"] == "loading"
    loading.set()
    until(lambda: peer.ask(op="health", id="h")["state"] == "warming")
    assert peer.ask(op="health", id="h")["ready"] is False
    reply = peer.ask(**SMALL, id="p")
    assert (reply["code"], reply["retryable"]) == ("not_ready", True)
    warming.set()
    until(lambda: peer.ask(op="health", id="h")["ready"])
    assert peer.ask(**SMALL, id="p")["status"] == "ok"


def test_stopping_finishes_what_was_taken_and_takes_no_more(house: Any) -> None:
    server, held = house.held()
    peer = house.peer(server)
    peer.send(**SMALL, id="a", session="a")
    peer.send(**SMALL, id="b", session="b")
    until(lambda: peer.ask(op="health", id="h")["waiting"] == 1)
    server.stop()
    until(lambda: peer.ask(op="health", id="h")["state"] == "draining")
    assert (
        house.log[-1]
        == "finishing 2 plans, for up to 10 s; one more signal ends the server at once"
    )
    assert peer.ask(**SMALL, id="c", session="c")["code"] == "draining"
    held.let()
    assert peer.final("a")["status"] == "ok"
    assert peer.final("b")["status"] == "ok"


def test_the_end_waits_for_answers_that_a_slow_reader_has_not_taken(
    house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = house.mock()
    peer = house.peer(server)
    with monkeypatch.context() as full:
        full.setattr(server._router, "_send", lambda message: "held")
        peer.send(op="ping", id="p")
        until(lambda: server._router.holding)
        server.stop()
        until(lambda: server._lifecycle.stopping)
    assert peer.receive()["id"] == "p"


def test_a_second_stop_does_not_wait(house: Any) -> None:
    server, held = house.held()
    peer = house.peer(server)
    peer.send(**SMALL, id="a", session="a")
    assert held.waiting.wait(20)
    peer.send(**SMALL, id="b", session="b")
    until(lambda: peer.ask(op="health", id="h")["waiting"] == 1)
    server.stop()
    server.stop()
    assert peer.final("b")["code"] == "draining"
    held.let()
    assert peer.final("a")["code"] == "cancelled"


class Slow(MockBackend):
    """A mock backend whose validations and drops wait for `go`, and whose prefixes wait for
    `pinned`. Each releases `begun` first.
    """

    def __init__(self) -> None:
        super().__init__(ServeConfig())
        self.begun = threading.Semaphore(0)
        self.go, self.pinned = threading.Event(), threading.Event()

    def validate(self, request: Any) -> Any:
        self.begun.release()
        assert self.go.wait(20)
        return super().validate(request)

    def pin(self, request: Any, stopped: Any) -> Any:
        self.begun.release()
        assert self.pinned.wait(20)
        return super().pin(request, stopped)

    def drop(self, prefix_id: str) -> bool:
        self.begun.release()
        assert self.go.wait(20)
        return super().drop(prefix_id)


OWED = (
    {"op": "validate", "id": "v", "prompt": "x"},
    {"op": "prefix.drop", "id": "d", "prefix_id": "x"},
)


def owing(house: Any) -> tuple[Any, Any, Slow]:
    """A server with a validation and the drop of a prefix under way, the client that waits for both
    answers, and the backend.
    """
    backend = Slow()
    server = house.serve(backend)
    peer = house.peer(server)
    for fields in OWED:
        peer.send(**fields)
        assert backend.begun.acquire(timeout=20)
    return server, peer, backend


def test_a_second_stop_does_not_wait_for_clerk_and_keeper(house: Any) -> None:
    server, peer, backend = owing(house)
    peer.send(op="prefix.put", id="p", prefix_id="x", system="x")
    assert backend.begun.acquire(timeout=20)
    server.stop()
    server.stop()
    assert {reply["id"]: reply["code"] for reply in (peer.receive(), peer.receive())} == {
        "v": "draining", "d": "draining"
    }  # fmt: skip
    backend.go.set()
    for _ in range(3):
        assert peer.ask(op="ping", id="g")["id"] == "g", "each is answered once"
    backend.pinned.set()
    assert peer.receive()["id"] == "p"


def test_admin_operations_must_be_allowed(house: Any, tmp_path: Path) -> None:
    peer = house.peer(house.mock())
    for op in ("drain", "shutdown"):
        assert peer.ask(op=op, id="x")["code"] == "unauthorized"
    server, held = house.held(bind=(f"ipc://{tmp_path}/plan",), allow_admin=True)
    peer = house.peer(server)
    peer.send(**SMALL, id="a")
    assert held.waiting.wait(20)
    assert peer.ask(op="drain", id="d")["draining"] is True
    assert peer.ask(**SMALL, id="b", session="b")["code"] == "draining"
    assert peer.ask(op="shutdown", id="d")["stopping"] is True
    held.let()
    assert peer.final("a")["status"] == "ok"


def test_a_hung_engine_ends_the_process_for_the_next_one_to_start() -> None:
    ended = threading.Event()
    codes: list[int] = []

    def die(code: int) -> None:
        codes.append(code)
        ended.set()

    class Hung(MockBackend):
        def start(self, prepared: Any, left_ms: Any) -> Any:
            ended.wait(20)
            return super().start(prepared, left_ms)

    config = ServeConfig(bind=("tcp://127.0.0.1:*",), watchdog_s=0.3, drain_s=0.0)
    notes: list[str] = []
    server = Server(
        lambda: Hung(config), config, log=lambda text: None, notify=notes.append, die=die
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.linger = 0
    peer.connect(server.endpoints[0])
    until(lambda: "READY=1" in notes)
    peer.send_multipart([b"", msgspec.json.encode({**SMALL, "id": "a"})])
    assert ended.wait(20)
    assert codes[0] == 70
    server.stop()
    thread.join(20)
    assert not thread.is_alive()
    assert "STOPPING=1" in notes
    peer.close()
    context.term()


@pytest.mark.parametrize("thread", ["engine", "clerk"])
def test_a_thread_that_dies_ends_the_server(
    house: Any, monkeypatch: pytest.MonkeyPatch, thread: str, tmp_path: Path
) -> None:
    class Panic(BaseException):
        """Like a panic in a Rust library, which is no Exception."""

    def panic(*_: object) -> Any:
        raise Panic("secret detail")

    backend = MockBackend(ServeConfig(), 0.002)
    if thread == "clerk":
        monkeypatch.setattr(backend, "prepare", panic)
    else:
        monkeypatch.setattr("thor_dflash.serving.server.server.write", panic)
    server = house.serve(backend, trace_slow_ms=1, trace_dir=str(tmp_path))
    reply = house.peer(server).ask(**SMALL, id="a")
    assert reply.get("code", "none") == ("engine_fault" if thread == "clerk" else "none")
    assert "secret" not in str(reply)
    until(lambda: server._lifecycle.failed)
    assert server._lifecycle.health(0, 0)["state"] == "failed"
    house.close()
    assert any("Panic: secret detail" in line for line in house.log)
    house.log[:] = [line for line in house.log if "Traceback" not in line]


def test_an_engine_that_is_lost_ends_the_server_after_an_answer_for_everybody() -> None:
    class Lost(MockBackend):
        def start(self, prepared: Any, left_ms: float | None) -> Any:
            gate.wait(20)
            raise EngineLost("the device answers nothing else")

        def validate(self, request: Any) -> Any:
            late.wait(20)
            return super().validate(request)

    def run() -> None:
        with pytest.raises(EngineLost, match="answers nothing else"):
            server.run()
        ended.set()

    gate, late, ended = threading.Event(), threading.Event(), threading.Event()
    settings = ServeConfig(bind=("tcp://127.0.0.1:*",))
    log: list[str] = []
    server = Server(lambda: Lost(ServeConfig()), settings, log=log.append)
    threading.Thread(target=run, daemon=True).start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.linger, peer.rcvtimeo = 0, 20_000
    peer.connect(server.endpoints[0])

    def ask(**fields: str) -> None:
        peer.send_multipart([b"", msgspec.json.encode(fields)])

    def answer() -> Any:
        return msgspec.json.decode(peer.recv_multipart()[-1])

    until(lambda: any(line.startswith("ready after") for line in log))
    for name in "ab":
        ask(op="plan", prompt="x", id=name, session=name)
    ask(op="validate", id="v", prompt="x")
    ask(op="health", id="h")
    assert answer()["id"] == "h", "all three are in the house"
    gate.set()
    given = [answer() for _ in range(3)]
    assert {(r["id"], r["code"]) for r in given} == {(n, "engine_fault") for n in "abv"}
    assert "answers nothing else" not in str(given), "that is for the log"
    late.set()
    assert ended.wait(20)
    peer.close()
    context.term()


def test_each_step_is_a_sign_of_life_and_no_work_needs_none(house: Any) -> None:
    server, held = house.held()
    peer, heartbeat = house.peer(server), server._lifecycle.heartbeat
    peer.send(**SMALL, id="a")
    assert held.waiting.wait(20)
    for step in range(1, 4):
        before = heartbeat.at
        held.let(1)
        until(lambda step=step: held.steps == step and held.waiting.is_set())  # type: ignore[misc]
        assert heartbeat.busy
        assert heartbeat.at > before
    held.let()
    assert peer.final("a")["status"] == "ok"
    assert heartbeat.age(time.monotonic() + 3600) == 0, "an idle engine is not a hung one"
