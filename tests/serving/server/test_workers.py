"""The engine thread by itself: its priority, and the reason it gives for the end of a plan."""

from __future__ import annotations

import os
import threading
import time
from queue import SimpleQueue
from typing import Any

import pytest

from thor_dflash.config.serving import ServeConfig
from thor_dflash.core.errors import EngineError, EngineLost, PlanError
from thor_dflash.serving.planner.backend import Backend
from thor_dflash.serving.planner.mock_backend import MockBackend
from thor_dflash.serving.protocol import messages
from thor_dflash.serving.protocol.codec import JSON
from thor_dflash.serving.server.heartbeat import Heartbeat
from thor_dflash.serving.server.scheduler import Job, Peer
from thor_dflash.serving.server.worker_messages import (
    BackendLoaded,
    JobDone,
    ServerFailed,
    WorkerEvent,
)
from thor_dflash.serving.server.workers import ENGINE_NICENESS, run_engine


def ran(backend: Any, *jobs: Job, load: Any = None) -> list[WorkerEvent]:
    """What the engine thread posts while it runs these jobs."""
    inbox, posts = SimpleQueue[Job | None](), list[WorkerEvent]()
    for job in (*jobs, None):
        inbox.put(job)
    work = (load or (lambda: backend), inbox, posts.append, Heartbeat(), lambda text: None)
    thread = threading.Thread(target=run_engine, args=work)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    return posts


@pytest.mark.parametrize("stop", ["cancelled", "preempted"])
def test_a_stopped_plan_is_no_deadline_that_passed_since(stop: Any) -> None:
    backend, ask = MockBackend(ServeConfig()), messages.PlanRequest(id="a", prompt="x")
    job = Job(
        request=ask,
        peer=Peer((b"peer",), JSON),
        session="s",
        arrived=time.monotonic() - 2.0,
        deadline=time.monotonic() - 1.0,
        state="running",
        prepared=backend.prepare(ask, None),
        stop=stop,
    )
    (outcome,) = [post.outcome for post in ran(backend, job) if isinstance(post, JobDone)]
    assert isinstance(outcome, PlanError)
    assert outcome.code == stop


@pytest.mark.parametrize("begun", [0, ENGINE_NICENESS + 2])
def test_the_engine_lets_other_threads_go_first(begun: int) -> None:
    """And does so before it loads: threads inherit the priority of the thread that makes them."""
    niceness: list[int] = []

    def nice() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def load() -> Backend:
        niceness.append(nice())
        return MockBackend(ServeConfig())

    def begin() -> None:
        least = max(nice(), begun)
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), least)
        niceness.append(max(least, ENGINE_NICENESS))
        ran(None, load=load)

    before = nice()
    thread = threading.Thread(target=begin)
    thread.start()
    thread.join(20)
    assert len(niceness) == 2
    assert niceness[0] == niceness[1]
    assert nice() == before, "and nobody else is slowed down"


@pytest.mark.parametrize("fault", [EngineError("the self-test must pass"), ValueError("a bug")])
def test_a_backend_that_fails_its_self_test_is_closed(fault: Exception) -> None:
    class Wrong(MockBackend):
        def warm(self) -> None:
            raise fault

        def close(self) -> None:
            closed.append(True)

    closed: list[bool] = []
    posts = ran(Wrong(ServeConfig()))
    assert [type(post) for post in posts] == [BackendLoaded, ServerFailed]
    assert closed == [True]


class Idle(MockBackend):
    """A mock that works whenever it may, until a test's function raises."""

    def __init__(self, fault: Exception | None = None) -> None:
        super().__init__(ServeConfig())
        self.begun, self.fault = threading.Event(), fault
        self.calls = 0

    def idle(self, stopped: Any) -> float | None:
        self.calls += 1
        if self.calls > 1 and self.fault is not None:
            raise self.fault
        if self.calls > 2:
            self.begun.set()
            while not stopped():
                time.sleep(1e-4)
            return None
        return 1e-3


def test_a_job_interrupts_what_the_backend_does_between_jobs() -> None:
    backend, ask = Idle(), messages.PlanRequest(id="a", prompt="x")
    inbox, posts, heartbeat = SimpleQueue[Job | None](), list[WorkerEvent](), Heartbeat()
    work = (lambda: backend, inbox, posts.append, heartbeat, lambda text: None)
    thread = threading.Thread(target=run_engine, args=work)
    thread.start()
    assert backend.begun.wait(20), "called again after the time that it asked for"
    assert heartbeat.busy
    peer, prepared = Peer((b"peer",), JSON), backend.prepare(ask, None)
    inbox.put(Job(request=ask, peer=peer, session="s", arrived=time.monotonic(), prepared=prepared))
    inbox.put(None)
    thread.join(20)
    assert isinstance(posts[-1], JobDone)
    assert not heartbeat.busy


@pytest.mark.parametrize("fault", [EngineLost("the device is gone"), EngineError("a bad step")])
def test_a_fault_between_jobs(fault: Exception) -> None:
    """A lost engine ends the server; after any other fault it goes on with the next job."""
    backend, ask = Idle(fault), messages.PlanRequest(id="a", prompt="x")
    inbox, posts = SimpleQueue[Job | None](), list[WorkerEvent]()
    logged = SimpleQueue[str]()
    work = (lambda: backend, inbox, posts.append, Heartbeat(), logged.put)
    thread = threading.Thread(target=run_engine, args=work)
    thread.start()
    assert "engine fault" in logged.get(timeout=20)
    peer, prepared = Peer((b"peer",), JSON), backend.prepare(ask, None)
    inbox.put(Job(request=ask, peer=peer, session="s", arrived=time.monotonic(), prepared=prepared))
    inbox.put(None)
    thread.join(20)
    assert isinstance(posts[-1], ServerFailed if isinstance(fault, EngineLost) else JobDone)
