"""Connections that bring no request: their time limits, their number, their lines in the log."""

from __future__ import annotations

import asyncio
import http.client
import logging
import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
from support.http_floods import AFTER_S, DESCRIPTORS, FLOODS, POST, flooded, measure
from support.http_gateway import gateway, get
from support.waiting import PATIENCE_S, until

from thor_dflash.core.errors import ConfigError
from thor_dflash.serving.gateway import http_server

MODELS = "GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
BODY = '{"messages": [{"role": "user", "content": "x"}]}'
CHAT = f"{POST.format('/v1/chat/completions')}Content-Length: {len(BODY)}\r\n\r\n{BODY}"


@pytest.fixture
def log(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Callable[[], list[str]]]:
    """Returns the lines that the gateways of a test have logged."""
    repeats = http_server.Repeats()
    loggers = [logging.getLogger(name) for name in ("uvicorn.error", "asyncio")]
    for logger in loggers:
        logger.removeFilter(http_server._repeats)  # of a gateway before
    monkeypatch.setattr(http_server, "_repeats", repeats)
    yield lambda: capfd.readouterr().err.splitlines()
    for logger in loggers:
        logger.removeFilter(repeats)


def connect(address: str, first: str = "") -> socket.socket:
    host, port = address.removeprefix("http://").split(":")
    found = socket.create_connection((host, int(port)), timeout=20)
    found.sendall(first.encode("latin-1"))
    return found


def status(connection: socket.socket, request: str = "") -> int:
    """Status of the answer to a request, which is read to its end."""
    connection.sendall(request.encode())
    reply = http.client.HTTPResponse(connection)
    reply.begin()
    reply.read()
    return reply.status


def lasts(connection: socket.socket, more: str) -> float:
    """Seconds until a connection is closed that sends something again and again."""
    begun = time.monotonic()
    connection.settimeout(0.05)
    try:
        while time.monotonic() < begun + 20:
            try:
                if not connection.recv(1 << 16):
                    break
            except TimeoutError:
                connection.sendall(more.encode())
    except OSError:
        pass
    return time.monotonic() - begun


@pytest.mark.parametrize("kind", sorted(set(FLOODS) - {"slow bodies", "large bodies"}))
def test_a_connection_without_a_request_ends(
    house: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(http_server, "HEAD_S", 0.3)
    monkeypatch.setattr(http_server, "IDLE_S", 0.3)
    first, more = FLOODS[kind]
    with gateway(house.mock().endpoints[0]) as address, closing(connect(address, first)) as one:
        assert lasts(one, more) < 5


def test_neither_an_answer_nor_the_time_before_the_next_request_is_cut(
    house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "HEAD_S", 0.1)
    server, held = house.held()
    with gateway(server.endpoints[0]) as address, closing(connect(address, CHAT)) as one:
        assert held.waiting.wait(20)
        time.sleep(0.3)
        held.let()
        assert status(one) == 200
        time.sleep(0.3)
        assert status(one, MODELS) == 200


@pytest.mark.parametrize("kind", ["slow headers", "no HTTP"])
def test_a_flood_keeps_nobody_from_an_answer(
    house: Any, monkeypatch: pytest.MonkeyPatch, log: Callable[[], list[str]], kind: str
) -> None:
    monkeypatch.setattr(http_server, "MOST", 64)
    monkeypatch.setattr(http_server, "BACKLOG", 8)
    server = house.mock().endpoints[0]
    with gateway(server) as address, flooded(address, kind, 150) as flood:
        until(lambda: flood.opened >= 150)
        for _ in range(5):
            assert '"ready":true' in get(f"{address}/health")
    lines = log()
    assert len(lines) <= 3, lines[:9]
    assert "64 connections are open" in lines[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", FLOODS)
def test_a_gateway_withstands_a_flood(kind: str) -> None:
    number = 40 if kind == "large bodies" else 1000
    found = measure(kind, number, 5.0, DESCRIPTORS)
    assert found.opened >= number
    assert found.failed == 0
    assert found.ms[-1] < 1e3 * PATIENCE_S
    assert found.after_ms[-1] < 1e3 * AFTER_S
    assert found.descriptors < DESCRIPTORS
    assert found.log_bytes < 1000
    assert found.memory_mb < 200


@pytest.mark.parametrize("kind", ["idle connections", "slow headers", "slow bodies"])
def test_the_one_idle_for_longest_is_replaced(
    house: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(http_server, "MOST", 3)
    server, held = house.held()
    with gateway(server.endpoints[0]) as address, ExitStack() as stack:
        stack.callback(held.let)
        asking, used, idle = (stack.enter_context(closing(connect(address))) for _ in range(3))
        idle.sendall(FLOODS[kind][0].encode())
        asking.sendall(CHAT.encode())
        assert held.waiting.wait(20)
        assert [status(used, MODELS) for _ in range(2)] == [200, 200]
        newest = stack.enter_context(closing(connect(address)))
        assert idle.recv(1) == b""
        assert [status(one, MODELS) for one in (used, newest)] == [200, 200]
        held.let()
        assert status(asking) == 200


def test_a_log_repeats_itself_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(http_server.time, "monotonic", lambda: now[0])
    repeats, lines = http_server.Repeats(), []

    def write(text: str, error: Exception | None = None) -> None:
        info = (type(error), error, None) if error else None
        record = logging.LogRecord("asyncio", logging.ERROR, "", 0, text, None, info)
        if repeats.filter(record):
            lines.append(logging.Formatter().format(record))

    for _ in range(1000):
        write("out of system resource\nsocket: 3", OSError(24, "Too many open files"))
        write("other")
        write("cancelled", asyncio.CancelledError())
    now[0] = http_server.REPEAT_S
    write("other")
    assert lines == [
        "out of system resource: [Errno 24] Too many open files", "other", "other (999 times more)",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("soft", "hard", "most"),
    [
        (256, 256, None),
        (256, 1024, 1024 - 352),
        (1024, 1 << 20, 4096),
        (1 << 20, 1 << 20, 4096),
        (1024, resource.RLIM_INFINITY, 4096),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 4096),
    ],
)
def test_there_are_as_many_connections_as_there_are_descriptors_for(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, most: int | None
) -> None:
    now = [(soft, hard)]
    monkeypatch.setattr(http_server.resource, "getrlimit", lambda _: now[-1])
    monkeypatch.setattr(http_server.resource, "setrlimit", lambda _, limits: now.append(limits))
    if most is None:
        with pytest.raises(ConfigError, match=r"open files must be >= 608 \(got 256\)"):
            http_server._most_connections(352)
    else:
        assert http_server._most_connections(352) == most
        assert now[-1][1] == hard
        assert now[-1][0] == resource.RLIM_INFINITY or now[-1][0] >= most + 352


def test_a_client_that_takes_no_answer_is_given_up(
    house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = http_server.ConnectionLimit(10)
    monkeypatch.setattr(http_server, "ConnectionLimit", lambda most: limit)
    monkeypatch.setattr(http_server, "STALLED_S", 1)
    with gateway(house.mock().endpoints[0]) as address, socket.socket() as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = address.removeprefix("http://").split(":")
        stalled.connect((host, int(port)))
        stalled.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200)
        until(lambda: limit._open)
        until(lambda: not limit._open)
