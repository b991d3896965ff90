"""The server's sockets by themselves: readers that are slow or gone, and the bell that wakes the
thread of the sockets.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import zmq

from thor_dflash.config.serving import ServeConfig
from thor_dflash.core.errors import ConfigError
from thor_dflash.serving.transport import router_socket as door_module
from thor_dflash.serving.transport.router_socket import (
    ConnectionClosed,
    ReceivedMessage,
    RouterSocket,
)

BULK = b"x" * 200_000


@pytest.fixture
def door() -> Iterator[RouterSocket]:
    it = RouterSocket(ServeConfig(bind=("tcp://127.0.0.1:*",)))
    yield it
    it.close()


@pytest.fixture
def reader(door: RouterSocket) -> Iterator[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger, socket.rcvhwm, socket.rcvbuf = 0, 1, 4096
    socket.connect(door.endpoints[0])
    yield socket
    socket.close(0)
    context.term()


def hear(door: RouterSocket, count: int) -> list[ReceivedMessage | ConnectionClosed]:
    """At least `count` events: also those that came together with the last of them."""
    end, events = time.monotonic() + 20, list[ReceivedMessage | ConnectionClosed]()
    while len(events) < count:
        assert time.monotonic() < end, events
        events += door.wait(0.5)
    return events


def meet(door: RouterSocket, reader: zmq.Socket[bytes]) -> tuple[bytes, ...]:
    reader.send_multipart([b"", b"{}"])
    (letter,) = hear(door, 1)
    assert isinstance(letter, ReceivedMessage)
    return letter.frames[:2]


def fill(door: RouterSocket, envelope: tuple[bytes, ...]) -> int:
    """Send until the reader's socket is full; return how many messages were sent."""
    sent = 0
    while door.send(envelope, BULK, droppable=True) == "sent":
        sent += 1
    return sent


def test_a_slow_reader_loses_chunks_and_no_results(
    door: RouterSocket, reader: zmq.Socket[bytes]
) -> None:
    envelope = meet(door, reader)
    sent = fill(door, envelope)
    assert [door.send(envelope, b"result %d" % i) for i in range(3)] == ["held"] * 3
    assert door.holding
    assert door.send(envelope, b"chunk", droppable=True) == "dropped", "not before the held ones"
    for _ in range(sent):
        assert reader.recv_multipart()[-1] == BULK
    end = time.monotonic() + 20
    while door.holding:
        assert door.retry(time.monotonic()) == []
        assert time.monotonic() < end
    assert [reader.recv_multipart()[-1] for _ in range(3)] == [b"result %d" % i for i in range(3)]
    assert door.send(envelope, b"chunk", droppable=True) == "sent"


def test_a_reader_that_takes_nothing_is_given_up(
    door: RouterSocket, reader: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    envelope = meet(door, reader)
    fill(door, envelope)
    assert door.send(envelope, b"result") == "held"
    assert door.retry(time.monotonic()) == []
    monkeypatch.setattr(door_module, "PATIENCE_S", 0.0)
    assert door.retry(time.monotonic() + 1) == [envelope[0]]
    assert not door.holding


def test_a_reader_that_takes_some_is_waited_for(
    door: RouterSocket, reader: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    envelope = meet(door, reader)
    fill(door, envelope)
    for _ in range(2):
        assert door.send(envelope, b"result") == "held"
    begun, takes = time.monotonic(), [True, False, False]
    monkeypatch.setattr(door, "_send", lambda message: "sent" if takes.pop(0) else "held")
    late = 0.8 * door_module.PATIENCE_S
    assert door.retry(begun + late) == []
    assert door.retry(begun + 2 * late) == [], "it took one since"


def test_a_reader_cannot_make_the_server_hold_without_end(
    door: RouterSocket, reader: zmq.Socket[bytes]
) -> None:
    envelope = meet(door, reader)
    fill(door, envelope)
    held = [door.send(envelope, b"result") for _ in range(door_module.MAX_HELD + 1)]
    assert held == ["held"] * door_module.MAX_HELD + ["gone"]


def test_who_left_is_heard_and_not_written_to(
    door: RouterSocket, reader: zmq.Socket[bytes]
) -> None:
    reader.send_multipart([b"", b"{}"])
    (letter,) = hear(door, 1)
    assert isinstance(letter, ReceivedMessage)
    reader.close(0)
    assert hear(door, 1) == [ConnectionClosed(letter.fd)]
    end = time.monotonic() + 20
    # libzmq removes the pipe to a peer some time after it reported the end of the connection.
    while door.send(letter.frames[:2], b"result") != "gone":
        assert time.monotonic() < end
    assert door.send((b"never met", b""), b"result") == "gone"


def test_last_words_are_heard_together_with_the_parting(door: RouterSocket) -> None:
    for _ in range(5):  # each connection reuses the descriptor of the one before
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.linger = 20_000
        socket.connect(door.endpoints[0])
        socket.send_multipart([b"", b"{}"])
        socket.close()
        context.term()  # returns when all is sent and closed
        *_, letter, left = hear(door, 2)
        assert isinstance(letter, ReceivedMessage)
        assert left == ConnectionClosed(letter.fd)


def test_messages_that_take_long_leave_other_work_its_turn(
    door: RouterSocket, reader: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    spent = [0.0]
    # In this one module: the clock of the test itself goes on.
    monkeypatch.setattr(door_module, "time", SimpleNamespace(monotonic=lambda: spent[0]))
    count, turns, end = 8, list[int](), time.monotonic() + 20
    for _ in range(count):
        reader.send_multipart([b"", b"{}"])
    while sum(turns) < count:
        assert time.monotonic() < end, turns
        turns.append(0)
        for letter in door.wait(0.5):
            assert isinstance(letter, ReceivedMessage)
            turns[-1] += 1
            spent[0] += 0.6 * door_module.BURST_S
            time.sleep(0.02)  # all the others have come by then
    assert max(turns) <= 2


def test_a_connection_that_reuses_a_closed_descriptor_has_not_left(
    door: RouterSocket, reader: zmq.Socket[bytes]
) -> None:
    door._gone.update(range(1 << 12))
    reader.send_multipart([b"", b"{}"])
    (letter,) = hear(door, 1)
    assert isinstance(letter, ReceivedMessage)


def test_a_bell_wakes_and_does_not_ring_on(door: RouterSocket) -> None:
    for _ in range(100_000):
        door.ring()
    begin = time.monotonic()
    assert list(door.wait(20.0)) == []
    assert time.monotonic() - begin < 10
    begin = time.monotonic()
    assert list(door.wait(0.05)) == []
    assert time.monotonic() - begin >= 0.04


def test_a_bell_that_is_rung_after_the_end_writes_into_nobodys_file() -> None:
    it = RouterSocket(ServeConfig(bind=("tcp://127.0.0.1:*",)))
    bell = it._bell
    it.close()
    out, other = os.pipe()
    try:
        os.dup2(other, bell)  # as the next file that is opened may get the same descriptor
        it.ring()
        os.set_blocking(out, False)
        with pytest.raises(BlockingIOError):
            os.read(out, 1)
    finally:
        for descriptor in {out, other, bell}:
            os.close(descriptor)


def test_a_door_that_is_closed_leaves_no_descriptor_open() -> None:
    def opened() -> int:
        RouterSocket(ServeConfig(bind=("tcp://127.0.0.1:*",))).close()
        return len(os.listdir("/proc/self/fd"))

    before, times = opened(), 16
    for _ in range(times):
        after = opened()
    assert after < before + times, "one for each door"


def test_a_signal_may_ring_while_the_bell_is_rung(monkeypatch: pytest.MonkeyPatch) -> None:
    it = RouterSocket(ServeConfig(bind=("tcp://127.0.0.1:*",)))
    write, rung = os.write, list[int]()

    def interrupted(bell: int, data: bytes) -> int:
        rung.append(bell)
        if len(rung) == 1:
            it.ring()
        return write(bell, data)

    monkeypatch.setattr(os, "write", interrupted)
    thread = threading.Thread(target=it.ring, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive(), "and closing it would wait for ever, too"
    assert len(rung) == 2
    it.close()


def test_a_door_that_cannot_open_leaves_no_file_open(door: RouterSocket) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(ConfigError, match=r"serve.bind must be"):
            RouterSocket(ServeConfig(bind=door.endpoints))
    assert len(os.listdir("/proc/self/fd")) == before
