"""`thor-dflash gateway`: what it refuses, and that it listens where it says."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from thor_dflash import cli


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--server", "foo"], "gateway.servers must be tcp://host:port or ipc://path (got foo)"),
        (["--server", "ipc://a", "--server", "ipc://"], "gateway.servers must be "),
        (["--set", 'gateway.servers=["foo"]'], "gateway.servers must be "),
        (["--set", "gateway.token_file=none"], "none must be a readable file (got: "),
        (["--keys", "nokeys"], "nokeys/client.secret must be a readable file (got: "),
        (["--listen", "127.0.0.1:PORT"], "gateway.listen must be a free address (got: "),
        (["--listen", "127.0.0.1"], "gateway.listen must be HOST:PORT (got 127.0.0.1)"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line_before_anything_listens(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        # Nothing starts, whatever happens.
        given = args if "--listen" in args else ["--listen", f"127.0.0.1:{port}", *args]
        assert cli.main(["gateway", *(arg.replace("PORT", port) for arg in given)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"thor-dflash: {message}")


@contextmanager
def running(first: str = "") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command in a process of its own that runs `first` before, and its address."""
    script = f"import signal, sys; from thor_dflash.cli import main\n{first}\nsys.exit(main())"
    args = ["gateway", "--server", "ipc:///nowhere/plan", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(
        [sys.executable, "-c", script, *args], stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stderr
        line = child.stderr.readline()
        assert line.startswith("listening on http://127.0.0.1:"), line
        yield child, line.split()[-1]


def test_the_command_listens_where_it_says() -> None:
    with running() as (child, address):
        with urllib.request.urlopen(f"{address}/models", timeout=20) as reply:
            assert b'"object":"list"' in reply.read()
        child.terminate()
        assert child.stderr
        assert "Traceback" not in child.stderr.read()


def test_ctrl_c_ends_it_in_order() -> None:
    # What a test starts in the background may have SIGINT ignored.
    with running("signal.signal(signal.SIGINT, signal.default_int_handler)") as (child, address):
        with urllib.request.urlopen(f"{address}/models", timeout=20):
            child.send_signal(signal.SIGINT)
        assert child.stderr
        assert child.stderr.read() == ""
        assert child.wait(20) == 0
