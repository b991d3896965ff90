"""The end of a server while one of its threads goes on, and the end that a client asks for."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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


WORK = """
import sys, time
import numpy as np
from onnx import TensorProto, helper
from thor_dflash.cli import main as cli
from thor_dflash.core.errors import ConfigError
from thor_dflash.runtime.engines.onnxruntime_import import ort
from thor_dflash.serving.server import server
from thor_dflash.cli.commands import serve

def load(args, config, progress, log):
    a = helper.make_tensor_value_info("a", TensorProto.FLOAT, [512, 512])
    b = helper.make_tensor_value_info("b", TensorProto.FLOAT, [512, 512])
    graph = helper.make_graph([helper.make_node("MatMul", ["a", "a"], ["b"])], "g", [a], [b])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    session = ort.InferenceSession(model.SerializeToString())
    with progress.task("loading"):
        log("in the midst")
        while True:
            session.run(None, {"a": np.zeros((512, 512), np.float32)})

def fail(args, config, progress, log):
    raise ConfigError("it must load")

serve._load = load
"""


def serving_of(tmp_path: Path, script: str) -> list[str]:
    """The command `serve`, which loads what WORK and `script` say instead of a package."""
    args = ["serve", "--package", "none", "--bind", f"ipc://{tmp_path}/plan"]
    last = "sys.exit(cli.main(sys.argv[1:]))"
    watchdog = ["--set", "serve.watchdog_s=0.5"]
    return [sys.executable, "-c", f"{WORK}\n{script}\n{last}", *args, *watchdog]


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGINT, signal.SIGTERM]])
def test_a_signal_in_the_midst_of_loading_is_an_end_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signals: list[int]
) -> None:
    """The code of a library still runs on a thread, and it would abort the process if the
    interpreter ended in the usual way.
    """
    monkeypatch.setenv("TERM", "xterm")  # on one that is called dumb, rich hides no cursor
    ours, theirs = pty.openpty()  # on a terminal there are progress bars, which hide the cursor
    with subprocess.Popen(serving_of(tmp_path, ""), stderr=theirs) as child:
        os.close(theirs)
        output = b""
        while b"in the midst" not in output:
            output += os.read(ours, 4096)
        for number in signals:
            child.send_signal(number)
        with suppress(OSError):  # raised at the end of a pseudo-terminal
            while more := os.read(ours, 4096):
                output += more
        os.close(ours)
    assert child.returncode == 0, output
    assert output.rindex(b"\x1b[?25h") > output.rindex(b"\x1b[?25l"), "the cursor is back"


def test_a_fault_is_printed_though_a_thread_goes_on(tmp_path: Path) -> None:
    script = "serve._load = fail; server.Server.ended = lambda self, within_s=0.0: False"
    done = subprocess.run(serving_of(tmp_path, script), capture_output=True, text=True)
    assert done.stderr.splitlines()[1:] == ["thor-dflash: it must load"]
    assert done.returncode == 2
