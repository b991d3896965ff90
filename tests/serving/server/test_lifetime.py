"""How a server begins and ends, and what becomes of the work of clients that leave."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
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
    old = house.peer(server, ROUTING_ID=b"robot")
    old.send(**SMALL, id="1")
    assert held.waiting.wait(20)
    new = house.peer(server, ROUTING_ID=b"robot")
    assert new.ask(op="ping", id="p")["id"] == "p"
    old.close()
    until(lambda: server._handlers.scheduler.running.stop)
    held.let()
    until(lambda: held.ended == ["cancelled"])
    assert new.silent(), "the other's plan is not its"


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


def test_a_hung_engine_ends_the_process_for_the_next_one_to_start(house: Any) -> None:
    ended, codes, states = threading.Event(), list[int](), list[str]()

    def die(code: int) -> None:
        codes.append(code)
        ended.set()

    class Hung(MockBackend):
        def start(self, prepared: Any, left_ms: Any) -> Any:
            ended.wait(20)
            return super().start(prepared, left_ms)

    config = ServeConfig(bind=("tcp://127.0.0.1:*",), watchdog_s=0.3, drain_s=0.0)
    server = Server(
        lambda: Hung(config), config, log=lambda text: None, notify=states.append, die=die
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    until(lambda: "READY=1" in states)
    house.peer(server).send(**SMALL, id="a")
    assert ended.wait(20)
    server.stop()
    thread.join(20)
    assert (codes[0], thread.is_alive()) == (70, False)
    assert "STOPPING=1" in states


@pytest.mark.parametrize("thread", ["files", "checks"])
def test_a_thread_that_dies_ends_the_server(
    house: Any, monkeypatch: pytest.MonkeyPatch, thread: str, tmp_path: Path
) -> None:
    class Panic(BaseException):
        """Like a panic in a Rust library, which is no Exception."""

    def panic(*_: object) -> Any:
        raise Panic("secret detail")

    backend = MockBackend(ServeConfig(), 0.002)
    if thread == "checks":
        monkeypatch.setattr("thor_dflash.serving.server.workers.JobChecked", panic)
    else:
        monkeypatch.setattr("thor_dflash.serving.server.server.write", panic)
    server = house.serve(backend, trace_slow_ms=1, trace_dir=str(tmp_path))
    reply = house.peer(server).ask(**SMALL, id="a")
    # The files' thread may fail before the plan is answered, or after it.
    assert reply.get("code", "engine_fault" if thread == "files" else "") == "engine_fault"
    assert "secret" not in str(reply)
    until(lambda: server._lifecycle.failed)
    assert server._lifecycle.health(0, 0)["state"] == "failed"
    house.close()
    assert any("Panic: secret detail" in line for line in house.log)
    house.log[:] = [line for line in house.log if "Traceback" not in line]


def test_an_engine_that_is_lost_ends_the_server_after_an_answer_for_everybody(house: Any) -> None:
    gate, late, ended = threading.Event(), threading.Event(), threading.Event()

    class Lost(MockBackend):
        def start(self, prepared: Any, left_ms: float | None) -> Any:
            gate.wait(20)
            raise EngineLost("the device answers nothing else")

        def validate(self, request: Any) -> Any:
            late.wait(20)
            return super().validate(request)

    def run() -> None:
        with pytest.raises(EngineLost):
            server.run()
        ended.set()

    config = ServeConfig(bind=("tcp://127.0.0.1:*",))
    server = Server(lambda: Lost(config), config, log=lambda text: None)
    threading.Thread(target=run, daemon=True).start()
    peer = house.peer(server)
    until(lambda: peer.ask(op="health", id="h")["ready"])
    for name in "ab":
        peer.send(**SMALL, id=name, session=name)
    peer.send(op="validate", id="v", prompt="x")
    assert peer.ask(op="health", id="h")["id"] == "h", "all three have arrived"
    gate.set()
    replies = [peer.receive() for _ in range(3)]
    assert {(r["id"], r["code"]) for r in replies} == {(n, "engine_fault") for n in "abv"}
    assert "answers nothing else" not in str(replies), "that is for the log"
    late.set()
    assert ended.wait(20)
