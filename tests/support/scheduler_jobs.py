"""Makes jobs and takes them through a server's schedule, for tests of the schedule alone."""

from __future__ import annotations

from typing import Any

from thor_dflash.serving.protocol import messages
from thor_dflash.serving.protocol.codec import JSON
from thor_dflash.serving.server.scheduler import Job, Peer, Scheduler


def job(id: str, session: str = "", at: float = 0.0, peer: bytes = b"p", **ask: Any) -> Job:
    """Returns a job that arrived at the time `at`, s. Its session is its id unless one is given."""
    request = messages.PlanRequest(id=id, prompt="x", **ask)
    ms = request.deadline_ms
    return Job(
        request=request,
        peer=Peer((peer, b""), JSON),
        session=session or id,
        arrived=at,
        deadline=None if ms is None else at + ms / 1e3,
    )


def queue(scheduler: Scheduler, *jobs: Job) -> list[tuple[str, str]]:
    """Add jobs and accept each, so that they are ready to run. Returns the id and the error code of
    every job that was displaced.
    """
    out: list[tuple[str, str]] = []
    for one in jobs:
        scheduler.arrive(one, 10.0)
        out += accept(scheduler, one)
    return out


def accept(scheduler: Scheduler, one: Job) -> list[tuple[str, str]]:
    """Accept a job that has arrived; returns what `queue` does."""
    displaced = scheduler.accept(one, 10.0)
    assert all(scheduler.remove(old) for old, _ in displaced)
    one.state = "queued"
    return [(old.request.id, error.code) for old, error in displaced]


def run(scheduler: Scheduler) -> str | None:
    """Let the next job begin; returns its id, or None if none may begin."""
    one = scheduler.next()
    if one is None:
        return None
    one.state = "running"
    return one.request.id


def full(scheduler: Scheduler, **priorities: int) -> None:
    """Queue jobs with these ids and priorities and begin one, which must be "runs"."""
    queue(scheduler, *(job(id, priority=priority) for id, priority in priorities.items()))
    assert run(scheduler) == "runs"


def urgent(id: str, session: str = "", priority: int = 8) -> Job:
    """Returns a job that preempts jobs of lower priority."""
    return job(id, session, priority=priority, preempt="lower")


def leave(scheduler: Scheduler, id: str) -> None:
    """Remove the job with this id, which must be in the scheduler."""
    assert scheduler.remove(next(one for one in scheduler.jobs() if one.request.id == id))


def waiting(scheduler: Scheduler) -> list[str]:
    """Returns the ids of the jobs that wait, in order."""
    return [one.request.id for one in scheduler.waiting]
