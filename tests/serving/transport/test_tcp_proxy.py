"""The proxy of the tcp endpoints: what it closes, whom it lets wait, and that nothing is lost."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import zmq
from support.flood_peers import HELLO
from support.waiting import PATIENCE_S

from thor_dflash.config.serving import ServeConfig
from thor_dflash.core.errors import ConfigError
from thor_dflash.serving.transport import tcp_proxy
from thor_dflash.serving.transport.router_socket import ReceivedMessage, RouterSocket

MAX = 100_000


@pytest.fixture
def router() -> Iterator[RouterSocket]:
    it = RouterSocket(ServeConfig(bind=("tcp://127.0.0.1:*",), max_message=MAX))
    yield it
    it.close()


@pytest.mark.parametrize(
    ("named", "at"),
    [
        ("lo", "127.0.0.1"),
        ("*", "127.0.0.1"),
        ("localhost", "127.0.0.1"),
        ("[::1]", "[::1]"),
        ("[::]", "[::1]"),
        ("[::]", "127.0.0.1"),
    ],
)
def test_an_endpoint_names_an_interface_or_an_address(named: str, at: str) -> None:
    """Those that libzmq takes."""
    router = RouterSocket(ServeConfig(bind=(f"tcp://{named}:*",), insecure=True))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.linger, peer.ipv6 = 0, True
    peer.connect(f"tcp://{at}:{router.endpoints[0].rpartition(':')[2]}")
    peer.send(b"{}")
    assert [one.frames[-1] for one in messages(router, PATIENCE_S, count=1)] == [b"{}"]
    context.destroy(0)
    router.close()


@pytest.mark.parametrize("named", ["no_such_interface0", "[lo]", "192.0.2.1", "a" * 70])
def test_another_endpoint_is_refused(named: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^serve\.bind must be a free address .*" + re.escape(named[:9])
    ):
        RouterSocket(ServeConfig(bind=(f"tcp://{named}:*",), insecure=True))


def connect(router: RouterSocket) -> socket.socket:
    host, port = router.endpoints[0].removeprefix("tcp://").split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def messages(router: RouterSocket, seconds: float, count: int = 0) -> list[ReceivedMessage]:
    """What arrives within some time, or until `count` messages have come."""
    end, found = time.monotonic() + seconds, list[ReceivedMessage]()
    while time.monotonic() < end and not 0 < count <= len(found):
        found += [one for one in router.wait(0.02) if isinstance(one, ReceivedMessage)]
    return found


def test_an_endless_message_closes_its_connection(router: RouterSocket) -> None:
    with connect(router) as peer:
        peer.sendall(HELLO)
        with pytest.raises(ConnectionError):
            while True:
                peer.sendall(b"\x01\x01x" * 1000)
    assert messages(router, 0.1) == []


def test_the_oldest_of_too_many_long_messages_closes_its_connection(
    router: RouterSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_proxy, "LARGE", 1)
    head = b"\x02" + (2 * MAX).to_bytes(8, "big")
    with connect(router) as whole, connect(router) as first, connect(router) as second:
        for peer in (whole, first, second):
            peer.sendall(HELLO)
            while b"READY" not in peer.recv(1000):  # before it libzmq takes no message
                pass
        whole.sendall(head + bytes(2 * MAX))
        assert [len(one.frames[-1]) for one in messages(router, PATIENCE_S, 1)] == [2 * MAX]
        for peer in (first, second):
            peer.sendall(b"\0\1x" + head + bytes(1000))
            assert [one.frames[-1] for one in messages(router, PATIENCE_S, 1)] == [b"x"]
        with suppress(ConnectionError):
            while first.recv(1000):
                pass
        second.sendall(bytes(2 * MAX - 1000))
        assert [len(one.frames[-1]) for one in messages(router, PATIENCE_S, 1)] == [2 * MAX]
        whole.sendall(b"\0\1x")
        assert messages(router, PATIENCE_S, 1)


def test_who_sends_more_than_the_rate_waits_and_others_do_not(
    router: RouterSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_proxy, "SPARE", 1e-3)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    heavy, light = (context.socket(zmq.DEALER) for _ in range(2))
    for one in (heavy, light):
        one.linger = 0
        one.connect(router.endpoints[0])
    count, begun = 8, time.monotonic()
    for _ in range(count):
        heavy.send(bytes(MAX // 4))
    light.send(b"{}")
    came = {True: list[float](), False: list[float]()}
    while len(came[False]) < count or not came[True]:
        assert time.monotonic() < begun + PATIENCE_S
        for one in messages(router, 0.02):
            came[one.frames[-1] == b"{}"].append(time.monotonic() - begun)
    context.destroy(0)
    # Two seconds' worth, of which one piece may come at once, and the last one is not waited for.
    assert came[False][-1] > 0.3
    assert came[True][0] < came[False][-1]


def test_connections_beyond_the_limit_are_closed(
    router: RouterSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_proxy, "MAX_CONNECTIONS", 1)
    with connect(router) as first, connect(router) as second:
        assert first.recv(1) == HELLO[:1]
        assert second.recv(1) == b""
    end = time.monotonic() + PATIENCE_S
    while True:  # until the server has noticed that the first one has left
        with connect(router) as third:
            if third.recv(1):
                break
        assert time.monotonic() < end


def test_a_new_connection_takes_the_place_of_the_quietest(
    router: RouterSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_proxy, "MAX_CONNECTIONS", 2)
    with connect(router) as first, connect(router) as second:
        for peer in (first, second):
            assert peer.recv(1) == HELLO[:1]
        first.sendall(HELLO)  # and is answered: the second one is the quietest now
        first.recv(1000)
        monkeypatch.setattr(tcp_proxy, "QUIET_S", 0.0)
        with connect(router) as third:
            assert third.recv(1) == HELLO[:1]
            while second.recv(1000):
                pass
            monkeypatch.setattr(tcp_proxy, "QUIET_S", 60.0)
            first.sendall(b"\0\0")  # a message
            assert messages(router, PATIENCE_S, count=1)


def test_what_a_closed_server_has_sent_still_arrives(router: RouterSocket) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.linger = 0
    peer.connect(router.endpoints[0])
    peer.send(b"{}")
    while not (found := messages(router, 0.02)):
        pass
    body = bytes(MAX)
    for _ in range(3):
        assert router.send(found[0].frames[:-1], body) == "sent"
    router.close()
    for _ in range(3):
        assert peer.poll(1e3 * PATIENCE_S)
        assert peer.recv() == body
    context.destroy(0)


def test_other_processes_cannot_go_around_it(router: RouterSocket) -> None:
    """The ROUTER's own socket can be seen in /proc/net/unix; only this process may connect."""
    prefix = f"@thor-dflash-{os.getpid()}-"
    names = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()]
    (name,) = {name for name in names if name.startswith(prefix)}
    script = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.settimeout(20); "
        "s.connect(chr(0) + sys.argv[1]); print(s.recv(1))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", script, name[1:]], capture_output=True, text=True, check=False
    )
    assert done.stdout == "b''\n"
