"""The engine thread by itself: its priority, and the reason it gives for the end of a plan."""

from __future__ import annotations

import os
import threading
import time
from queue import SimpleQueue
from typing import Any

import pytest

from thor_dflash.config.serving import ServeConfig
from thor_dflash.core.errors import EngineError, PlanError
from thor_dflash.serving.planner.backend import Backend
from thor_dflash.serving.planner.mock_backend import MockBackend
from thor_dflash.serving.protocol import messages
from thor_dflash.serving.protocol.codec import JSON
from thor_dflash.serving.server.scheduler import Job, Peer
from thor_dflash.serving.server.workers import (
    ENGINE_NICENESS,
    BackendLoaded,
    Heartbeat,
    JobDone,
    ServerFailed,
    WorkerEvent,
    run_engine,
)


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
