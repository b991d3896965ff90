"""The server as a process, and the examples of docs/examples as its clients."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cpp_clients import needs_cpp, program

from thor_dflash.serving.client import Options, PlanRequest, RemotePlanner

EXAMPLES = Path(__file__).parents[3] / "docs/examples"
RUN = "import sys; from thor_dflash.cli.main import main; sys.exit(main())"
SCRIPT = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
PYTHON_EXAMPLE = (sys.executable, "-c", SCRIPT, EXAMPLES / "plan.py")
"""As `python plan.py` runs it, with the package of this checkout."""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a mock server at ipc://tmp_path/plan."""
    children: list[subprocess.Popen[str]] = []

    def begin(*args: str, env: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        serve = [sys.executable, "-c", RUN, "serve", "--mock", "--bind", f"ipc://{tmp_path}/plan"]
        child = subprocess.Popen([*env, *serve, *args], stderr=subprocess.PIPE, text=True)
        children.append(child)
        assert child.stderr
        for line in child.stderr:
            if " ready after " in line:
                break
        return child

    yield begin
    for child in children:
        child.kill()
        child.communicate()


@pytest.fixture
def planner(tmp_path: Path) -> Iterator[RemotePlanner]:
    with RemotePlanner(f"ipc://{tmp_path}/plan", Options(timeout_s=20.0)) as it:
        yield it


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name)
def test_a_signal_drains_and_leaves_time_to_read(
    start: Start, planner: RemotePlanner, number: signal.Signals
) -> None:
    """SIGHUP is the signal of a terminal that is closed. When a connection is lost, libzmq drops
    what a client has received and not read: so a server waits a little before its end.
    """
    child = start("--mock-cycle-ms", "1")
    stream = planner.stream(PlanRequest(prompt="x", stream="all"))
    next(stream)
    child.send_signal(number)
    time.sleep(0.3)  # meanwhile the last answer has arrived, unread
    *_, result = stream
    assert result.status == "ok"  # type: ignore[union-attr]
    assert child.wait(20) == 0
    assert child.stderr
    *_, plan, last = child.stderr.read().splitlines()
    assert " plan id=" in plan
    assert last.endswith("Z stopped")


def test_two_signals_end_at_once(start: Start, planner: RemotePlanner) -> None:
    child = start("--mock-cycle-ms", "200")
    next(planner.stream(PlanRequest(prompt="x", stream="all")))
    child.send_signal(signal.SIGTERM)
    child.send_signal(signal.SIGINT)
    assert child.wait(20) == 0


def test_systemd_is_notified(start: Start) -> None:
    name = f"\0thor-dflash-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as reader:
        reader.bind(name)
        reader.settimeout(20)
        child = start(env=("env", "NOTIFY_SOCKET=" + name.replace("\0", "@")))
        states = [reader.recv(99)]
        while b"READY=1" not in states or b"WATCHDOG=1" not in states:
            states.append(reader.recv(99))
        child.terminate()
        while states[-1] != b"STOPPING=1":
            states.append(reader.recv(99))
        assert child.wait(20) == 0


def run(command: list[Any], status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stdout + done.stderr
    return done


def test_the_command_line_and_the_python_example(start: Start, tmp_path: Path) -> None:
    start()
    endpoint = f"ipc://{tmp_path}/plan"
    command = [sys.executable, "-c", RUN, "plan", "Bring it.", "--server", endpoint]
    done = run(command)
    assert '{"goal": "cup on table"' in done.stdout
    assert "plan valid, ended by stop" in done.stderr
    (tmp_path / "schema.json").write_text('{"type": 5}')
    done = run([*command, "--schema", str(tmp_path / "schema.json")], 2)
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith("thor-dflash: json_schema must be")
    lines = run([*PYTHON_EXAMPLE, endpoint, "x"]).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["step", "step", "step", "done"]
    assert run([*PYTHON_EXAMPLE], 2).stderr == "usage: plan.py ENDPOINT TEXT\n"
    assert run([*PYTHON_EXAMPLE, "nowhere", "x"], 1).stdout.startswith("refused ConfigError(")


@needs_cpp
@pytest.mark.slow
def test_the_cpp_example(start: Start, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    start()
    made = program(EXAMPLES / "plan.cpp", pytestconfig, tmp_path)
    lines = run([made, f"ipc://{tmp_path}/plan", "x"]).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["step", "step", "step", "done"]
    assert lines[0] == 'step "goto" {"target":"shelf"}'
    for endpoint, text in (("nowhere", "x"), ("tcp://127.0.0.1:1", b"\xff")):
        assert run([made, endpoint, text], 2).stderr.startswith(f"plan: {endpoint}: ")
