"""Which plans get into a full queue, whose place they take, and that the queue keeps its limit."""

from __future__ import annotations

import pytest
from support.scheduler_jobs import accept, full, job, leave, queue, run, urgent, waiting

from thor_dflash.core.errors import PlanError
from thor_dflash.serving.planner.backend import StopReason
from thor_dflash.serving.protocol import messages
from thor_dflash.serving.protocol.codec import JSON
from thor_dflash.serving.server import scheduler
from thor_dflash.serving.server.scheduler import Job, Peer, Scheduler


def test_a_full_queue_makes_room_for_one_that_may_displace_less_urgent_ones() -> None:
    books = Scheduler(3)
    full(books, runs=9, a=3, b=5, c=3)
    for ask in ({"priority": 9}, {"priority": 9, "preempt": "same_session"},
                {"priority": 3, "preempt": "lower"}):  # fmt: skip
        with pytest.raises(PlanError, match="waiting plans must be <= 3"):
            books.arrive(job("x", **ask), 1.0)
    assert queue(books, job("d", priority=4, preempt="lower")) == [("c", "preempted")]
    assert queue(books, job("e", priority=6, preempt="lower")) == [("a", "preempted")]
    assert queue(books, job("f", priority=6, preempt="lower")) == [("d", "preempted")]
    assert queue(books, job("g", priority=6, preempt="lower")) == [("b", "preempted")]
    with pytest.raises(PlanError, match="wait"):
        books.arrive(job("h", priority=6, preempt="lower"), 1.0)
    running = books.running
    assert running
    assert running.stop is None
    assert [one.request.id for one in books.waiting] == ["e", "f", "g"]


def test_where_the_running_plan_makes_way_nobody_else_does() -> None:
    books = Scheduler(2)
    full(books, runs=5, a=0, b=0)
    assert queue(books, job("c", priority=6, preempt="lower")) == []
    running = books.running
    assert running
    assert running.stop == "preempted"
    assert books.leave(running)
    assert run(books) == "c"


def test_two_urgent_plans_under_check_have_a_place_each() -> None:
    books = Scheduler(2)
    full(books, runs=9, a=1, b=2)
    first, second = urgent("c"), urgent("d")
    for one in (first, second):
        books.arrive(one, 1.0)
    with pytest.raises(PlanError, match="wait"):
        books.arrive(urgent("e"), 1.0)
    assert accept(books, first) == [("a", "preempted")]
    assert accept(books, second) == [("b", "preempted")]
    assert waiting(books) == ["c", "d"]


@pytest.mark.parametrize("leaves", ["runs", "a", "b"])
def test_where_a_place_became_free_meanwhile_no_waiting_plan_is_displaced(leaves: str) -> None:
    books = Scheduler(2)
    full(books, runs=9, a=1, b=2)
    books.arrive(one := urgent("c"), 1.0)
    leave(books, leaves)
    if leaves == "runs":
        assert run(books) == "b"
    assert accept(books, one) == []
    if leaves == "runs":
        assert books.running
        assert books.running.stop == "preempted", "it runs, and is less urgent"


@pytest.mark.parametrize("stop", ["cancelled", "preempted"])
def test_a_running_plan_that_ends_already_is_place_enough(stop: StopReason) -> None:
    books = Scheduler(2)
    full(books, runs=9, a=1, b=9)
    assert books.running
    books.running.stop = stop
    assert queue(books, urgent("c", priority=5)) == []
    leave(books, "runs")
    assert waiting(books) == ["a", "b", "c"], "one of which is the engine's now"


def test_nobody_makes_way_for_those_who_are_still_under_check() -> None:
    books = Scheduler(2)
    full(books, runs=9, a=1, b=9)
    books.arrive(one := urgent("c"), 1.0)
    leave(books, "b")
    books.arrive(other := job("d", priority=0), 1.0)
    assert accept(books, one) == []
    assert books.leave(other), "the clerk refused it"
    assert waiting(books) == ["a", "c"]


def test_a_place_that_a_refused_plan_had_claimed_can_be_claimed_again() -> None:
    books = Scheduler(2)
    full(books, runs=9, a=1, b=9)
    books.arrive(one := urgent("c", "arm"), 1.0)
    with pytest.raises(PlanError, match="wait"):
        books.arrive(urgent("d"), 1.0)
    with pytest.raises(PlanError, match="wait"):
        books.arrive(job("e", "arm"), 1.0)  # displaces c, but may not take the place of a as c may
    assert books.leave(one)
    assert queue(books, urgent("f")) == [("a", "preempted")]


def test_a_place_that_is_given_up_already_is_counted_once() -> None:
    books = Scheduler(2)
    full(books, runs=9, a=1, b=9)
    books.arrive(urgent("c", "arm"), 1.0)
    leave(books, "a")  # the plan whose place c has claimed
    with pytest.raises(PlanError, match="wait"):
        books.arrive(job("d"), 1.0)
    leave(books, "b")
    books.arrive(job("e", "arm"), 1.0)  # displaces c
    queue(books, job("f"))
    with pytest.raises(PlanError, match="wait"):
        books.arrive(job("g"), 1.0)


def test_who_is_displaced_under_check_displaces_nobody() -> None:
    books = Scheduler(2)
    full(books, runs=9, a=1, b=9)
    books.arrive(urgent("c", "arm"), 1.0)  # claims the place of a
    leave(books, "b")
    books.arrive(job("d", "arm"), 1.0)  # displaces c
    with pytest.raises(PlanError, match="wait"):
        books.arrive(job("e"), 1.0)


def test_where_the_place_is_gone_when_a_plan_was_checked_it_is_busy_after_all() -> None:
    """When c came, it would have preempted the running plan, and the newer generation of d would
    have made a leave. When c was checked, the running plan had ended, and a ran in its place.
    """
    books = Scheduler(2)
    queue(books, job("runs"))
    assert run(books) == "runs"
    old = job("a", "arm", priority=9, preempt="none", generation=1)
    queue(books, old, job("b", priority=9))
    new = job("d", "arm", priority=7, preempt="none", generation=2)
    for one in (new, last := urgent("c", priority=6)):
        books.arrive(one, 1.0)
    leave(books, "runs")
    assert run(books) == "a"
    assert accept(books, new) == []
    with pytest.raises(PlanError, match="waiting plans must be <= 2") as caught:
        books.accept(last, 850.0)
    assert (caught.value.code, caught.value.retry_after_ms) == ("busy", 850.0)
    assert old.stop is None
    assert books.leave(last)
    assert waiting(books) == ["b", "d"]


def test_a_prefix_that_waits_to_be_pinned_is_not_displaced() -> None:
    books = Scheduler(1)
    full(books, runs=9)
    put = messages.PrefixPut(id="put", prefix_id="skills", system="x")
    pinned = scheduler.job_of(Peer((b"p", b""), JSON), put, 0.0)
    books.arrive(pinned, 1.0)
    pinned.state = "queued"
    with pytest.raises(PlanError, match="wait"):
        books.arrive(job("c", priority=9, preempt="lower"), 1.0)


def put(books: Scheduler, id: str) -> Job:
    """A request to pin a prefix, whose turn has come."""
    request = messages.PrefixPut(id=id, prefix_id=id, system="x")
    one = scheduler.job_of(Peer((b"p", b""), JSON), request, 0.0)
    books.arrive(one, 850.0)
    one.state = "queued"
    assert run(books) == id
    return one


def test_prefixes_that_wait_for_the_disk_take_no_plans_place() -> None:
    books = Scheduler(2)
    for id in "pqr":
        put(books, id).state = "keeping"
    assert waiting(books) == []
    full(books, runs=9, a=3, b=5)
    assert waiting(books) == ["a", "b"]
    with pytest.raises(PlanError, match="waiting plans must be <= 2"):
        books.arrive(job("c"), 1.0)
    assert queue(books, urgent("d")) == [("a", "preempted")]


def test_only_a_prefix_is_refused_for_those_that_wait_for_the_disk() -> None:
    books = Scheduler(2)
    for id in "pq":
        put(books, id).state = "keeping"
    last = put(books, "r")
    for _ in range(2):
        with pytest.raises(PlanError, match="prefix.put requests .* must be <= 3") as caught:
            put(books, "s")
        assert (caught.value.code, caught.value.retry_after_ms) == ("busy", 850.0)
        last.state = "keeping"
    leave(books, "p")
    put(books, "s")
