"""The end of a server while one of its threads goes on, and the end that a client asks for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.waiting import until

from thor_dflash.config.serving import ServeConfig
from thor_dflash.serving.planner.mock_backend import MockBackend
from thor_dflash.serving.server.server import Server


@contextmanager
def running(load: Any) -> Iterator[tuple[Server, threading.Thread]]:
    """A server and its thread, which must have ended soon after the `with` block."""
    config = ServeConfig(bind=("tcp://127.0.0.1:*",), watchdog_s=60.0)
    server = Server(load, config, log=lambda text: None)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    yield server, thread
    thread.join(20)
    assert not thread.is_alive()


@pytest.mark.parametrize("stops", [1, 2])
def test_the_end_waits_for_no_backend_that_nobody_will_use(stops: int) -> None:
    begun, go = threading.Event(), threading.Event()

    def load() -> MockBackend:
        begun.set()
        assert go.wait(60)
        return MockBackend(ServeConfig())

    with running(load) as (server, _):
        assert begun.wait(20)
        for _ in range(stops):
            server.stop()
    assert not server.ended()
    go.set()
    assert server.ended(20)


def test_a_second_stop_is_obeyed_while_threads_are_waited_for() -> None:
    class Long(MockBackend):
        def close(self) -> None:
            closing.set()
            assert go.wait(60)

    closing, go = threading.Event(), threading.Event()
    with running(lambda: Long(ServeConfig())) as (server, thread):
        until(server._lifecycle.ready)
        server.stop()
        assert closing.wait(20)
        thread.join(0.5)  # longer than a thread that still loads would be waited for
        assert thread.is_alive(), "the first stop waits"
        server.stop()
    assert not server.ended()
    go.set()
    assert server.ended(20)


def test_an_end_that_clients_ask_for_finishes_what_was_taken_however_often(
    house: Any, tmp_path: Path
) -> None:
    admin = {"bind": (f"ipc://{tmp_path}/plan",), "allow_admin": True}
    server, held = house.held(**admin)
    peer, other = house.peer(server), house.peer(server)
    for name in "ab":
        peer.send(op="plan", prompt="x", id=name, session=name)
    assert held.waiting.wait(20)
    until(lambda: peer.ask(op="health", id="h")["waiting"] == 1)
    for _ in range(3):
        assert other.ask(op="shutdown", id="s")["stopping"] is True
    until(
        lambda: (
            house.log[-1] == "finishing 2 plans, for up to 10 s; two signals end the server at once"
        )
    )
    server.stop()
    assert other.ask(op="shutdown", id="s")["stopping"] is True
    assert other.ask(op="health", id="h")["waiting"] == 1, "a signal after it is a first one"
    server.stop()
    assert peer.final("b")["code"] == "draining"
    held.let()
    assert peer.final("a")["code"] == "cancelled"
