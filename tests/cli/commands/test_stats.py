"""`thor-dflash stats` against a mock: drawn on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from support.serving_fixtures import House

from thor_dflash.cli.main import main
from thor_dflash.cli.report.server_facts import ServerReport
from thor_dflash.core.results import Timings
from thor_dflash.serving.protocol.messages import Result
from thor_dflash.serving.server.server import Server
from thor_dflash.serving.server.stats import Stats

COMMAND = [sys.executable, "-m", "thor_dflash.cli.main", "stats", "--watch", "0.1"]


class DumbTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def server(house: House) -> Server:
    server = house.mock()
    plan = {"op": "plan", "prompt": "x", "deadline_ms": 20_000}
    assert house.peer(server).ask(**plan)["type"] == "result"
    return server


def ticks(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let `--watch` make so many samples, then press Ctrl-C."""

    def samples() -> Iterator[None]:
        yield from [None] * (count - 1)
        raise KeyboardInterrupt

    steps = samples()
    monkeypatch.setattr(time, "sleep", lambda seconds: next(steps))


def test_what_a_pipe_gets(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["stats", "--server", server.endpoints[0]]
    assert main(command) == 0
    facts = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert (facts["state"], facts["accept length"]) == ("ready", "4.00 tokens a cycle")
    assert facts["deadlines"] == "1 met, 0 missed, 0 refused"
    ticks(monkeypatch, 2)
    assert main([*command, "--watch", "5"]) == 130
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    words = dict(word.split("=") for word in lines[1].split()[1:])
    assert (words["state"], words["finished"], words["deadlines_met"]) == ("ready", "1", "1")
    assert "watts" not in lines[1]  # this machine has no sensors
    ticks(monkeypatch, 2)
    assert main([*command, "--watch", "5", "--json"]) == 130
    tables = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [table["stats"]["finished"] for table in tables] == [{"stop": 1}] * 2


def test_a_terminal_that_cannot_draw_gets_lines(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = DumbTerminal()
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys, "stdout", screen)
    ticks(monkeypatch, 1)
    assert main(["stats", "--server", server.endpoints[0], "--watch"]) == 130
    assert "state=ready" in screen.getvalue()
    assert "\x1b" not in screen.getvalue()


def test_watts_are_the_energy_of_plans_over_their_time() -> None:
    stats = Stats()
    for e2e, joules in ((1500.0, 30.0), (2500.0, 90.0)):
        times = Timings(queue_ms=500, e2e_ms=e2e, energy_j={"A": joules / 2, "VDD_GPU": joules})
        stats.result(Result(finish_reason="stop", timings=times))
    health = {"state": "ready", "error": None, "uptime_s": 1.0, "running": 0, "waiting": 0}
    hello = {"server": {"name": "thor-dflash", "version": "1"}, "model": None}
    facts = {fact.name: fact.text for fact in ServerReport(health, hello, stats.show()).facts()}
    assert facts["watts"] == "VDD_GPU 40.0, A 20.0"
    assert stats.show()["last"][1]["watts"] == {"A": 22.5, "VDD_GPU": 45.0}


def test_a_server_that_is_gone_is_waited_for(
    house: House, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = ["stats", "--server", "tcp://127.0.0.1:1", "--wait", "0.1"]
    assert main(nowhere) == 4
    capsys.readouterr()
    ticks(monkeypatch, 2)
    assert main([*nowhere, "--watch"]) == 130
    assert capsys.readouterr().out.count("state=unreachable") == 2
    for wrong in ("0", "nan"):
        assert main([*nowhere, "--watch", wrong]) == 2


def test_ctrl_c_leaves_the_terminal_as_it_was(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen, terminal = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    process = subprocess.Popen(
        [*COMMAND, "--server", server.endpoints[0]],
        stdin=terminal, stdout=terminal, stderr=terminal,
    )  # fmt: skip
    os.close(terminal)
    shown = b""
    while b"accept length" not in shown:
        shown += os.read(screen, 4096)
    process.send_signal(signal.SIGINT)
    try:
        while more := os.read(screen, 4096):
            shown += more
    except OSError:  # the last process that had the terminal has ended
        pass
    os.close(screen)
    assert process.wait(20) == 130
    assert shown.index(b"\x1b[?1049h") < shown.index(b"ready") < shown.rindex(b"\x1b[?1049l")
    assert shown.endswith(b"thor-dflash: interrupted\r\n")
    assert b"Traceback" not in shown
