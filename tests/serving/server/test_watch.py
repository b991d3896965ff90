"""What a server reports: events, traces of slow plans, its device; and the time it leaves idle."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.constrained_model import package

from thor_dflash.config.engine import EngineConfig
from thor_dflash.config.serving import ServeConfig
from thor_dflash.core.progress import Silent
from thor_dflash.runtime.session import open_session
from thor_dflash.serving.client import PlanRequest
from thor_dflash.serving.planner.planner import LocalPlanner
from thor_dflash.serving.planner.session_backend import SessionBackend
from thor_dflash.serving.server import host_info
from thor_dflash.serving.server.event_log import LineFile, line

SMALL = {"op": "plan", "prompt": "the secret word"}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_happens_is_written_down_and_prompts_are_not(house: Any, tmp_path: Path) -> None:
    path = tmp_path / "events"
    server, held = house.held(events=str(path))
    peer = house.peer(server)
    peer.send(**SMALL, id="a", session="arm")
    assert held.waiting.wait(20)
    peer.send(**SMALL, id="0", session="leg")
    peer.send(**SMALL, id="1", session="leg")
    assert peer.final("0")["code"] == "preempted"
    assert peer.ask(op="cancel", id="c", target="1")["cancelled"] is True
    assert peer.final("1")["code"] == "cancelled"
    peer.send(**SMALL, id="b")
    assert peer.ask(op="cancel", id="c", target="b")["cancelled"] is True
    assert peer.final("b")["code"] == "cancelled"
    held.let()
    assert peer.final("a")["status"] == "ok"
    assert peer.ask(op="prefix.put", id="p", prefix_id="x", system="You plan.")["tokens"] == 2
    finished = peer.ask(op="stats", id="s")["finished"]
    assert finished == {"preempted": 1, "cancelled": 2, "stop": 1}
    house.close()
    found = lines(path)
    assert [t["t"] for t in found] == sorted(t["t"] for t in found)
    assert [(t["event"], t.get("id")) for t in found if "id" in t] == [
        ("arrived", "a"), ("begun", "a"), ("arrived", "0"), ("arrived", "1"), ("refused", "0"),
        ("cancel", "1"), ("refused", "1"), ("arrived", "b"), ("cancel", "b"), ("refused", "b"),
        ("answered", "a"), ("arrived", "p"), ("begun", "p"), ("pinned", "p"),
    ]  # fmt: skip
    states = [t["state"] for t in found if t["event"] == "state"]
    assert states[-1] == "draining"
    assert "ready" in states
    assert "busy" in states
    assert next(t for t in found if t["event"] == "answered")["usage"]["output_tokens"] > 0
    assert found[-1]["event"] == "ended"
    assert "secret" not in path.read_text()


@contextmanager
def full_beyond(size: int) -> Iterator[None]:
    """No file of this process may grow beyond `size` bytes, as on a disk that is nearly full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_loses_events_and_counts_them(tmp_path: Path) -> None:
    path, log = tmp_path / "events", list[str]()
    file = LineFile(str(path), log.append)
    file.write(line("state", {"number": 0}))
    with full_beyond(path.stat().st_size + 10):
        for number in (1, 2, 3):
            file.write(line("state", {"number": number}))
    file.write(line("state", {"number": 4}))
    file.write(line("state", {"number": 5}))
    file.close()
    written = [(t["event"], t.get("number", t.get("lines"))) for t in lines(path)]
    assert written == [("state", 0), ("lost", 3), ("state", 4), ("state", 5)]
    assert len(log) == 1
    assert "serve.events" in log[0]


def test_a_slow_plan_leaves_its_steps_and_a_fast_one_does_not(house: Any, tmp_path: Path) -> None:
    server = house.mock(0.01, trace_slow_ms=60, trace_dir=str(tmp_path / "traces"))
    peer = house.peer(server)
    assert peer.ask(**SMALL, id="../slow", thinking_budget=4)["status"] == "ok"
    assert peer.ask(**SMALL, id="fast", thinking="off", max_tokens=4)["type"] == "result"
    peer.ask(**SMALL, id="slow2", thinking="off")
    house.close()
    first, second = sorted((tmp_path / "traces").iterdir())
    assert first.name.endswith("-.._slow.trace.json")
    assert second.name.endswith("-slow2.trace.json")
    found = json.loads(first.read_text())
    steps = found["traceEvents"]
    names = [step["name"] for step in steps]
    assert names[:3] == ["queued", "prefill", "thinking"]
    assert set(names[3:]) == {"answer"}
    assert all(step["ph"] == "X" and step["dur"] >= 0 for step in steps)
    ends = [step["ts"] + step["dur"] for step in steps]
    assert [step["ts"] for step in steps[1:]] == pytest.approx(ends[:-1])
    assert ends[-1] >= 60e3
    assert found["otherData"]["result"][0]["output_tokens"] > 0


def test_a_thor_is_known_by_its_files(tmp_path: Path) -> None:
    files = {
        "proc/device-tree/model": "NVIDIA Jetson AGX Thor Developer Kit\0",
        "proc/meminfo": "MemTotal:       128849018 kB\nMemAvailable:   101000000 kB\n",
        "sys/class/devfreq/gpu-gpc-0/cur_freq": "1575000000\n",
        "sys/class/devfreq/bwmgr/cur_freq": "4266000000\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = host_info.describe("cuda", tmp_path)
    assert found["name"] == "NVIDIA Jetson AGX Thor Developer Kit"
    assert found["memory_mb"] == 125829
    now = host_info.now(tmp_path)
    assert (now["gpu_mhz"], now["emc_mhz"], now["memory_available_mb"]) == (1575, 4266, 98632)
    nothing = host_info.now(tmp_path / "empty")
    assert set(nothing.values()) == {None}


def test_idle_time_before_each_step_is_left_to_others_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    session = open_session(package(), EngineConfig(threads=1), Silent())
    ask = PlanRequest(
        prompt="Pick the mug.", thinking="off", max_tokens=20, parts=("tokens", "timings")
    )
    found = []
    for idle in (0, 700):
        backend = SessionBackend(session, ServeConfig(yield_us=idle))
        found.append(LocalPlanner(backend).plan(ask))
    assert found[0].tokens == found[1].tokens
    assert found[1].spec
    waits = [each for each in slept if each]  # sleep(0) lets other threads run
    assert waits == [700e-6] * (found[1].spec.cycles + 1), "each cycle, and one prefill step"
    session.close()


def test_prompts_are_logged_on_request_and_write_no_line_of_their_own(house: Any) -> None:
    for wanted in (False, True):
        peer = house.peer(house.mock(log_prompts=wanted))
        assert peer.ask(op="plan", prompt="x\nready\x1b[2J", id="b\nc")["status"] == "ok"
        assert (r"plan b\nc asks: x\nready\x1b[2J" in house.log) == wanted
        assert any("[2J" in line for line in house.log) == wanted
