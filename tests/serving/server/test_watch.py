"""What a server reports: events, traces of slow plans, its device; and the time it leaves idle."""

from __future__ import annotations

import json
import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.constrained_model import package
from support.waiting import until

from thor_dflash.config.engine import EngineConfig
from thor_dflash.config.serving import ServeConfig
from thor_dflash.core.errors import ConfigError
from thor_dflash.core.progress import Silent
from thor_dflash.runtime.session import open_session
from thor_dflash.serving.client import PlanRequest
from thor_dflash.serving.planner.mock_backend import MockBackend
from thor_dflash.serving.planner.planner import LocalPlanner
from thor_dflash.serving.planner.session_backend import SessionBackend
from thor_dflash.serving.server import event_log, host_info, trace
from thor_dflash.serving.server.event_log import EventLog, LineFile, line
from thor_dflash.serving.server.server import Server

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


def test_what_is_refused_at_the_door_is_written_down_too(house: Any, tmp_path: Path) -> None:
    path = tmp_path / "events"
    peer = house.peer(house.mock(events=str(path)))
    peer.ask(**SMALL, id="a", generation=2, session="arm")
    assert peer.ask(**SMALL, id="b", generation=1, session="arm")["code"] == "stale"
    assert peer.ask(**SMALL, id="c", secret=1)["code"] == "bad_request"
    checked = {"op": "validate", "prompt": "x", "json_schema": {"type": 1}}
    assert peer.ask(**checked, id="d")["code"] == "schema_invalid"  # found by another thread
    house.close()
    found = [(t.get("id"), t["code"]) for t in lines(path) if t["event"] == "refused"]
    assert found == [("b", "stale"), ("c", "bad_request"), ("d", "schema_invalid")]


def test_events_are_appended_and_what_is_null_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events"
    for number in range(2):
        log = EventLog(str(path))
        log("never")
        log.start()
        log("state", state="ready", error=None, number=number)
        log.close()
        log("never")
    written = [{name: line[name] for name in line if name != "t"} for line in lines(path)]
    assert written == [{"event": "state", "state": "ready", "number": n} for n in range(2)]
    with pytest.raises(ConfigError, match="serve.events"):
        EventLog(str(tmp_path))


def test_events_that_wait_for_the_disk_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "MAX_QUEUED", 2)
    path, sleep = tmp_path / "events", threading.Event()
    monkeypatch.setattr(event_log, "time", SimpleNamespace(time=time.time, sleep=sleep.wait))
    log = EventLog(str(path))
    log.start()
    log("state", number=0)
    until(log._queue.empty)  # the thread has taken it, and sleeps
    for number in range(1, 5):
        log("state", number=number)
    sleep.set()
    until(log._queue.empty)
    log("ended")
    log.close()
    written = [(t["event"], t.get("number", t.get("lines"))) for t in lines(path)]
    assert written == [("state", 0), ("state", 1), ("state", 2), ("lost", 2), ("ended", None)]


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
    path = tmp_path / "events"
    file = LineFile(str(path))
    file.write(line("state", {"number": 0}))
    with full_beyond(path.stat().st_size + 10):
        for number in (1, 2, 3):
            file.write(line("state", {"number": number}))
    file.write(line("state", {"number": 4}))
    file.write(line("state", {"number": 5}))
    file.close()
    written = [(t["event"], t.get("number", t.get("lines"))) for t in lines(path)]
    assert written == [("state", 0), ("lost", 3), ("state", 4), ("state", 5)]


def test_a_slow_reader_of_events_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="serve.events"):
        LineFile(str(path))
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    file, sent = LineFile(str(path)), 3000
    for number in range(sent):
        file.write(line("state", {"number": number}))
    text = b""
    with suppress(BlockingIOError):  # raised when the pipe is empty
        while more := os.read(reader, 1 << 16):
            text += more
    read = [json.loads(line) for line in text.splitlines()]
    assert [t["number"] for t in read] == list(range(len(read)))
    file.write(line("ended", {}))
    lost, ended = map(json.loads, os.read(reader, 1 << 16).splitlines())
    assert (lost["event"], lost["lines"], ended["event"]) == ("lost", sent - len(read), "ended")
    os.close(reader)
    file.write(line("never", {}))
    file.close()


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


def test_no_plan_waits_for_the_disk_that_takes_a_trace(
    house: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stalled, goes_on = threading.Event(), threading.Event()

    def write(*args: Any) -> Path:
        stalled.set()
        assert goes_on.wait(20)
        return trace.write(*args)

    monkeypatch.setattr("thor_dflash.serving.server.server.write", write)
    peer = house.peer(house.mock(0.001, trace_slow_ms=1, trace_dir=str(tmp_path)))
    try:
        for id in "ab":
            assert peer.ask(**SMALL, id=id)["status"] == "ok"
            assert stalled.wait(20)
    finally:
        goes_on.set()
    house.close()
    assert len(list(tmp_path.iterdir())) == 2, "they are written before the server ends"


@pytest.mark.parametrize("where", ["file", "file/traces", "/proc"])
def test_a_directory_that_takes_no_traces_is_refused_before_anything_listens(
    where: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    bad = str(tmp_path / where)
    config = ServeConfig(bind=("no://where",), trace_slow_ms=1, trace_dir=bad)
    with pytest.raises(ConfigError, match=rf"^serve.trace_dir must be .* \(got {bad}: "):
        Server(lambda: MockBackend(config), config)


@pytest.mark.parametrize("now", [0, 10**15, 10**18], ids=str)
def test_a_clock_that_was_set_back_costs_no_new_trace(
    now: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "kept-by-hand.trace.json"
    own.touch()
    for number in range(trace.MAX_TRACES):
        trace.write(tmp_path, f"old{number}", {})
    monkeypatch.setattr(time, "time_ns", lambda: now)
    for number in range(3):
        assert trace.write(tmp_path, f"new{number}", {}).exists()
    left = {path.name.split("-")[1].split(".")[0] for path in tmp_path.iterdir() if path != own}
    assert left == {f"old{n}" for n in range(3, trace.MAX_TRACES)} | {"new0", "new1", "new2"}
    assert own.exists()


def test_the_device_is_described(house: Any) -> None:
    peer = house.peer(house.mock())
    found = peer.ask(op="hello", id="h")["device"]
    assert found["engine"] == "mock"
    assert found["memory_mb"] > 0
    now = peer.ask(op="stats", id="s")["device"]
    assert 0 < now["resident_mb"] < found["memory_mb"]
    assert now["memory_available_mb"] > 0


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
    assert slept == [700e-6] * (found[1].spec.cycles + 1), "each cycle, and one prefill step"
    session.close()


def test_prompts_are_logged_on_request_and_write_no_line_of_their_own(house: Any) -> None:
    for wanted in (False, True):
        peer = house.peer(house.mock(log_prompts=wanted))
        assert peer.ask(op="plan", prompt="x\nready\x1b[2J", id="b\nc")["status"] == "ok"
        assert (r"plan b\nc asks: x\nready\x1b[2J" in house.log) == wanted
        assert any("[2J" in line for line in house.log) == wanted
