"""`thor-dflash gateway`: what it refuses, and that it listens where it reports."""

from __future__ import annotations

import http.client
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from support.http_gateway import JSON
from support.waiting import until

from thor_dflash.cli import main


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--server", "foo"], "gateway.servers must be tcp://host:port or ipc://path (got foo)"),
        (["--keys", "nokeys"], "nokeys/client.secret must be a readable file (got: "),
        (["--listen", "127.0.0.1:PORT"], "gateway.listen must be a free address (got: "),
    ],
    ids=str,
)
def test_a_mistake_is_one_line_before_anything_listens(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        # A port that is taken, so that even a gateway that accepts the mistake cannot start.
        given = args if "--listen" in args else ["--listen", f"127.0.0.1:{port}", *args]
        assert main.main(["gateway", *(arg.replace("PORT", port) for arg in given)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"thor-dflash: {message}")


@contextmanager
def running(
    first: str = "", server: str = "ipc:///nowhere/plan"
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The gateway command in a process of its own, which runs the code `first` before it; and the
    address on which it listens.
    """
    script = f"import signal, sys; from thor_dflash.cli.main import main\n{first}\nsys.exit(main())"
    args = ["gateway", "--server", server, "--listen", "127.0.0.1:0"]
    with subprocess.Popen(
        [sys.executable, "-c", script, *args], stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stderr
        line = child.stderr.readline()
        assert line.startswith("listening on http://127.0.0.1:"), line
        try:
            yield child, line.split()[-1]
        finally:
            child.kill()  # a test that failed must not wait for it


def test_the_command_listens_where_it_reports() -> None:
    with running() as (child, address):
        with urllib.request.urlopen(f"{address}/models", timeout=20) as reply:
            assert b'"object":"list"' in reply.read()
        child.terminate()
        assert child.stderr
        assert "Traceback" not in child.stderr.read()


# A test run that was started in the background may ignore SIGINT, which its children inherit.
CTRL_C = "signal.signal(signal.SIGINT, signal.default_int_handler)"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_order(number: int) -> None:
    with running(CTRL_C) as (child, address):
        with urllib.request.urlopen(f"{address}/models", timeout=20):
            child.send_signal(number)
        assert child.stderr
        assert (child.stderr.read(), child.wait(20)) == ("", 0)


def place(address: str) -> tuple[str, int]:
    """Host and port of an address."""
    host, _, port = address.split("/")[2].partition(":")
    return host, int(port)


def listens(address: str) -> bool:
    with socket.socket() as client:
        return client.connect_ex(place(address)) == 0


@contextmanager
def stream(address: str) -> Iterator[None]:
    """The client of a streamed completion, after the first line of the reply has come."""
    connection = http.client.HTTPConnection(*place(address), timeout=20)
    body = b'{"messages": [{"role": "user", "content": "x"}], "stream": true}'
    connection.request("POST", "/v1/chat/completions", body, JSON)
    with closing(connection), connection.getresponse() as reply:
        assert reply.readline().startswith(b"data: ")
        yield


AT_ONCE = "from thor_dflash.cli.commands import gateway; gateway.DRAIN_S = 0"


def ends_with_a_line(child: subprocess.Popen[str]) -> None:
    """SIGTERM ends it although a request is open, which it reports and nothing else."""
    child.terminate()
    assert child.wait(20) == 0
    assert child.stderr
    expected = child.stderr.read()
    assert expected.count("\n") == 1, expected
    assert "1 running task" in expected


def test_a_client_that_stalls_does_not_keep_it_alive() -> None:
    with running(AT_ONCE) as (child, address), socket.socket() as client:
        client.settimeout(20)
        client.connect(place(address))
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n")
        client.sendall(b"Content-Type: application/json\r\n")
        client.sendall(b"Expect: 100-continue\r\nContent-Length: 9\r\n\r\n")
        assert client.recv(99).startswith(b"HTTP/1.1 100"), "it waits for the body"
        ends_with_a_line(child)


def test_ctrl_c_twice_ends_its_plans_and_is_no_fault(house: Any) -> None:
    server, held = house.held()
    held.let(2)
    with running(CTRL_C, server.endpoints[0]) as (child, address), stream(address):
        assert held.waiting.wait(20)
        child.send_signal(signal.SIGINT)
        until(lambda: not listens(address))  # two pending signals would be delivered as one
        child.send_signal(signal.SIGINT)
        assert child.stderr
        assert (child.stderr.read(), child.wait(20)) == ("", 0)
        held.let()
    until(lambda: held.ended)
    assert held.ended == ["cancelled"]
