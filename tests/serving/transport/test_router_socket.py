"""The server's sockets by themselves: readers that are slow or gone, and the pipe that wakes the
I/O thread.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq

from thor_dflash.config.serving import ServeConfig
from thor_dflash.core.errors import ConfigError
from thor_dflash.serving.transport import access, router_socket
from thor_dflash.serving.transport.router_socket import (
    ConnectionClosed,
    ReceivedMessage,
    RouterSocket,
)

BULK = b"x" * 200_000


@pytest.fixture
def router() -> Iterator[RouterSocket]:
    it = RouterSocket(ServeConfig(bind=("tcp://127.0.0.1:*",)))
    yield it
    it.close()


@pytest.fixture
def reader(router: RouterSocket) -> Iterator[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger, socket.rcvhwm, socket.rcvbuf = 0, 1, 4096
    socket.connect(router.endpoints[0])
    yield socket
    socket.close(0)
    context.term()


def receive(router: RouterSocket, count: int) -> list[ReceivedMessage | ConnectionClosed]:
    """At least `count` events: also those that came together with the last of them."""
    end, events = time.monotonic() + 20, list[ReceivedMessage | ConnectionClosed]()
    while len(events) < count:
        assert time.monotonic() < end, events
        events += router.wait(0.5)
    return events


def meet(router: RouterSocket, reader: zmq.Socket[bytes]) -> tuple[bytes, ...]:
    reader.send_multipart([b"", b"{}"])
    (message,) = receive(router, 1)
    assert isinstance(message, ReceivedMessage)
    return message.frames[:2]


def fill(router: RouterSocket, envelope: tuple[bytes, ...]) -> int:
    """Send until the reader's socket is full; return how many messages were sent."""
    sent = 0
    while router.send(envelope, BULK, droppable=True) == "sent":
        sent += 1
    return sent


def test_a_slow_reader_loses_chunks_and_no_results(
    router: RouterSocket, reader: zmq.Socket[bytes]
) -> None:
    envelope = meet(router, reader)
    sent = fill(router, envelope)
    assert [router.send(envelope, b"result %d" % i) for i in range(3)] == ["held"] * 3
    assert router.holding
    assert router.send(envelope, b"chunk", droppable=True) == "dropped", "not before the held ones"
    for _ in range(sent):
        assert reader.recv_multipart()[-1] == BULK
    end = time.monotonic() + 20
    while router.holding:
        assert router.retry(time.monotonic()) == []
        assert time.monotonic() < end
    assert [reader.recv_multipart()[-1] for _ in range(3)] == [b"result %d" % i for i in range(3)]
    assert router.send(envelope, b"chunk", droppable=True) == "sent"


def test_a_reader_that_takes_nothing_is_given_up(
    router: RouterSocket, reader: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    envelope = meet(router, reader)
    fill(router, envelope)
    for _ in range(2):
        assert router.send(envelope, b"result") == "held"
    begun, takes = time.monotonic(), [True, False, False, False]
    monkeypatch.setattr(router, "_send", lambda message: "sent" if takes.pop(0) else "held")
    late = 0.8 * router_socket.PATIENCE_S
    assert router.retry(begun + late) == []
    assert router.retry(begun + 2 * late) == [], "it took one since"
    assert router.retry(begun + 3 * late) == [envelope[0]]
    assert not router.holding


def test_a_reader_cannot_make_the_server_hold_without_end(
    router: RouterSocket, reader: zmq.Socket[bytes]
) -> None:
    envelope = meet(router, reader)
    fill(router, envelope)
    held = [router.send(envelope, b"result") for _ in range(router_socket.MAX_HELD + 1)]
    assert held == ["held"] * router_socket.MAX_HELD + ["gone"]


def test_a_peer_that_left_is_reported_and_not_written_to(
    router: RouterSocket, reader: zmq.Socket[bytes]
) -> None:
    reader.send_multipart([b"", b"{}"])
    (message,) = receive(router, 1)
    assert isinstance(message, ReceivedMessage)
    reader.close(0)
    assert receive(router, 1) == [ConnectionClosed(message.fd)]
    end = time.monotonic() + 20
    # libzmq removes the pipe to a peer some time after it reported the end of the connection.
    while router.send(message.frames[:2], b"result") != "gone":
        assert time.monotonic() < end
    assert router.send((b"never met", b""), b"result") == "gone"


def test_the_last_message_comes_before_the_end_of_its_connection(router: RouterSocket) -> None:
    for _ in range(5):  # each connection reuses the descriptor of the one before
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.linger = 20_000
        socket.connect(router.endpoints[0])
        socket.send_multipart([b"", b"{}"])
        socket.close()
        context.term()  # returns when all is sent and closed
        *_, message, closed = receive(router, 2)
        assert isinstance(message, ReceivedMessage)
        assert closed == ConnectionClosed(message.fd)


def test_messages_that_take_long_leave_other_work_its_turn(
    router: RouterSocket, reader: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    spent = [0.0]
    # In this one module: the clock of the test itself goes on.
    monkeypatch.setattr(router_socket, "time", SimpleNamespace(monotonic=lambda: spent[0]))
    count, turns, end = 8, list[int](), time.monotonic() + 20
    for _ in range(count):
        reader.send_multipart([b"", b"{}"])
    while sum(turns) < count:
        assert time.monotonic() < end, turns
        turns.append(0)
        for message in router.wait(0.5):
            assert isinstance(message, ReceivedMessage)
            turns[-1] += 1
            spent[0] += 0.6 * router_socket.BURST_S
            time.sleep(0.02)  # all the others have come by then
    assert max(turns) <= 2


def test_a_path_is_free_whose_socket_ends_while_it_is_examined(tmp_path: Path) -> None:
    path = tmp_path / "plan"
    ended = threading.Event()

    def come_and_go() -> None:
        while not ended.is_set():
            os.mkfifo(path)
            path.unlink()

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _ in range(5000):
            with suppress(ConfigError):
                access.check_free(f"ipc://{path}")
    finally:
        ended.set()
        thread.join()


def test_its_ipc_file_ends_with_it_and_that_of_another_stays(tmp_path: Path) -> None:
    path = tmp_path / "plan"
    for replaced in (False, True):
        router = RouterSocket(ServeConfig(bind=(f"ipc://{path}",)))
        assert path.is_socket()
        if replaced:  # by a server that began meanwhile
            path.unlink()
            path.touch()
        router.close()
        assert path.exists() == replaced
