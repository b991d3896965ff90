"""Which plans get into a full queue, whose place they take, and that the queue keeps its limit."""

from __future__ import annotations

import pytest
from support.scheduler_jobs import accept, full, job, leave, queue, run, urgent, waiting

from thor_dflash.core.errors import PlanError
from thor_dflash.serving.planner.backend import StopReason
from thor_dflash.serving.protocol import messages
from thor_dflash.serving.protocol.codec import JSON
from thor_dflash.serving.server.scheduler import Job, Peer, Scheduler, job_of


def test_a_full_queue_makes_room_for_one_that_may_displace_less_urgent_ones() -> None:
    jobs = Scheduler(3)
    full(jobs, runs=9, a=3, b=5, c=3)
    for ask in ({"priority": 9}, {"priority": 9, "preempt": "same_session"},
                {"priority": 3, "preempt": "lower"}):  # fmt: skip
        with pytest.raises(PlanError, match="waiting plans must be <= 3"):
            jobs.arrive(job("x", **ask), 1.0)
    assert queue(jobs, job("d", priority=4, preempt="lower")) == [("c", "preempted")]
    assert queue(jobs, job("e", priority=6, preempt="lower")) == [("a", "preempted")]
    assert queue(jobs, job("f", priority=6, preempt="lower")) == [("d", "preempted")]
    assert queue(jobs, job("g", priority=6, preempt="lower")) == [("b", "preempted")]
    with pytest.raises(PlanError, match="wait"):
        jobs.arrive(job("h", priority=6, preempt="lower"), 1.0)
    running = jobs.running
    assert running
    assert running.stop is None
    assert [one.request.id for one in jobs.waiting] == ["e", "f", "g"]


def test_two_urgent_plans_under_check_have_a_place_each() -> None:
    jobs = Scheduler(2)
    full(jobs, runs=9, a=1, b=2)
    first, second = urgent("c"), urgent("d")
    for one in (first, second):
        jobs.arrive(one, 1.0)
    with pytest.raises(PlanError, match="wait"):
        jobs.arrive(urgent("e"), 1.0)
    assert accept(jobs, first) == [("a", "preempted")]
    assert accept(jobs, second) == [("b", "preempted")]
    assert waiting(jobs) == ["c", "d"]


@pytest.mark.parametrize("leaves", ["runs", "a", "b"])
def test_where_a_place_became_free_meanwhile_no_waiting_plan_is_displaced(leaves: str) -> None:
    jobs = Scheduler(2)
    full(jobs, runs=9, a=1, b=2)
    jobs.arrive(one := urgent("c"), 1.0)
    leave(jobs, leaves)
    if leaves == "runs":
        assert run(jobs) == "b"
    assert accept(jobs, one) == []
    if leaves == "runs":
        assert jobs.running
        assert jobs.running.stop == "preempted", "it runs, and is less urgent"


@pytest.mark.parametrize("stop", ["cancelled", "preempted"])
def test_a_running_plan_that_ends_already_is_place_enough(stop: StopReason) -> None:
    jobs = Scheduler(2)
    full(jobs, runs=9, a=1, b=9)
    assert jobs.running
    jobs.running.stop = stop
    assert queue(jobs, urgent("c", priority=5)) == []
    leave(jobs, "runs")
    assert waiting(jobs) == ["a", "b", "c"], "one of which is the engine's now"


def test_nobody_makes_way_for_those_who_are_still_under_check() -> None:
    jobs = Scheduler(2)
    full(jobs, runs=9, a=1, b=9)
    jobs.arrive(one := urgent("c"), 1.0)
    leave(jobs, "b")
    jobs.arrive(other := job("d", priority=0), 1.0)
    assert accept(jobs, one) == []
    assert jobs.remove(other), "the clerk refused it"
    assert waiting(jobs) == ["a", "c"]


def test_a_place_that_a_refused_plan_had_claimed_can_be_claimed_again() -> None:
    jobs = Scheduler(2)
    full(jobs, runs=9, a=1, b=9)
    jobs.arrive(one := urgent("c", "arm"), 1.0)
    with pytest.raises(PlanError, match="wait"):
        jobs.arrive(urgent("d"), 1.0)
    with pytest.raises(PlanError, match="wait"):
        jobs.arrive(job("e", "arm"), 1.0)  # displaces c, but may not take the place of a as c may
    assert jobs.remove(one)
    assert queue(jobs, urgent("f")) == [("a", "preempted")]


def test_where_the_place_is_gone_when_a_plan_was_checked_it_is_busy_after_all() -> None:
    """When c came, it would have preempted the running plan, and the newer generation of d would
    have made a leave. When c was checked, the running plan had ended, and a ran in its place.
    """
    jobs = Scheduler(2)
    queue(jobs, job("runs"))
    assert run(jobs) == "runs"
    old = job("a", "arm", priority=9, preempt="none", generation=1)
    queue(jobs, old, job("b", priority=9))
    new = job("d", "arm", priority=7, preempt="none", generation=2)
    for one in (new, last := urgent("c", priority=6)):
        jobs.arrive(one, 1.0)
    leave(jobs, "runs")
    assert run(jobs) == "a"
    assert accept(jobs, new) == []
    with pytest.raises(PlanError, match="waiting plans must be <= 2") as caught:
        jobs.accept(last, 850.0)
    assert (caught.value.code, caught.value.retry_after_ms) == ("busy", 850.0)
    assert old.stop is None
    assert jobs.remove(last)
    assert waiting(jobs) == ["b", "d"]


def test_a_prefix_that_waits_to_be_pinned_is_not_displaced() -> None:
    jobs = Scheduler(1)
    full(jobs, runs=9)
    put = messages.PrefixPut(id="put", prefix_id="skills", system="x")
    pinned = job_of(Peer((b"p", b""), JSON), put, 0.0)
    jobs.arrive(pinned, 1.0)
    pinned.state = "queued"
    with pytest.raises(PlanError, match="wait"):
        jobs.arrive(job("c", priority=9, preempt="lower"), 1.0)


def put(jobs: Scheduler, id: str) -> Job:
    """A request to pin a prefix, whose turn has come."""
    request = messages.PrefixPut(id=id, prefix_id=id, system="x")
    one = job_of(Peer((b"p", b""), JSON), request, 0.0)
    jobs.arrive(one, 850.0)
    one.state = "queued"
    assert run(jobs) == id
    return one


def test_prefixes_that_wait_for_the_disk_take_no_plans_place() -> None:
    jobs = Scheduler(2)
    for id in "pqr":
        put(jobs, id).state = "writing"
    assert waiting(jobs) == []
    full(jobs, runs=9, a=3, b=5)
    assert waiting(jobs) == ["a", "b"]
    with pytest.raises(PlanError, match="waiting plans must be <= 2"):
        jobs.arrive(job("c"), 1.0)
    assert queue(jobs, urgent("d")) == [("a", "preempted")]


def test_only_a_prefix_is_refused_for_those_that_wait_for_the_disk() -> None:
    jobs = Scheduler(2)
    for id in "pq":
        put(jobs, id).state = "writing"
    last = put(jobs, "r")
    for _ in range(2):
        with pytest.raises(PlanError, match="prefix.put requests .* must be <= 3") as caught:
            put(jobs, "s")
        assert (caught.value.code, caught.value.retry_after_ms) == ("busy", 850.0)
        last.state = "writing"
    leave(jobs, "p")
    put(jobs, "s")


def test_where_the_running_plan_makes_way_nobody_else_does() -> None:
    jobs = Scheduler(2)
    full(jobs, runs=5, a=0, b=0)
    assert queue(jobs, job("c", priority=6, preempt="lower")) == []
    running = jobs.running
    assert running
    assert running.stop == "preempted"
    assert jobs.remove(running)
    assert run(jobs) == "c"
