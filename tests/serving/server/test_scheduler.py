"""The jobs of the scheduler: who runs next, whom a new plan displaces, and what is refused."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scheduler_jobs import accept, job, queue, run

from thor_dflash.core.errors import PlanError
from thor_dflash.serving.protocol import messages
from thor_dflash.serving.protocol.codec import JSON
from thor_dflash.serving.server.scheduler import Peer, Scheduler, job_of


def test_the_most_urgent_first_then_the_oldest() -> None:
    jobs = Scheduler(8)
    queue(jobs, job("a"), job("b", priority=9), job("c", priority=9), job("d", priority=0))
    order: list[str | None] = []
    while id := run(jobs):
        order.append(id)
        running = jobs.running
        assert running
        assert run(jobs) is None, "one at a time"
        assert jobs.remove(running)
    assert order == ["b", "c", "a", "d"]


def test_a_prefix_takes_its_turn_as_a_plan_that_names_no_priority() -> None:
    jobs = Scheduler(8)
    put = job_of(
        Peer((b"p", b""), JSON), messages.PrefixPut(id="put", prefix_id="x", system="x"), 0.0
    )
    for one in (job("a", priority=4), put, job("b"), job("c", priority=6)):
        jobs.arrive(one, 1.0)
        accept(jobs, one)
    order: list[str | None] = []
    while id := run(jobs):
        order.append(id)
        assert jobs.running
        assert jobs.remove(jobs.running)
    assert order == ["c", "put", "b", "a"]


def test_a_full_queue_says_busy_and_when_to_come_again() -> None:
    jobs = Scheduler(2)
    queue(jobs, job("a"), job("b"), job("c"))
    for _ in range(2):
        with pytest.raises(PlanError) as caught:
            jobs.arrive(job("d"), 850.0)
        assert (caught.value.code, caught.value.retry_after_ms) == ("busy", 850.0)
        assert len(jobs) == 3
        run(jobs)  # the three places are taken whether or not one of the plans already runs
    assert jobs.remove(jobs.jobs()[0])
    assert queue(jobs, job("d")) == []


def test_the_latest_of_a_session_wins() -> None:
    jobs = Scheduler(1)
    queue(jobs, job("a", "arm"))
    assert queue(jobs, job("b", "arm")) == [("a", "preempted")]
    assert run(jobs) == "b"
    running = jobs.running
    queue(jobs, job("c", "leg"))
    assert running
    assert running.stop is None
    assert queue(jobs, job("d", "leg")) == [("c", "preempted")], "also where the queue is full"
    with pytest.raises(PlanError, match="wait"):
        jobs.arrive(job("e", "arm", preempt="none"), 1.0)
    assert running.stop is None, "a plan that was refused preempts nobody"
    assert queue(jobs, job("f", "arm")) == [], "it takes the place of the one that runs"
    assert running.stop == "preempted"
    with pytest.raises(PlanError, match="wait"):
        jobs.arrive(job("g", "foot"), 1.0)
    assert jobs.remove(running)
    assert [run(jobs), *(one.request.id for one in jobs.waiting)] == ["d", "f"]


def test_a_plan_that_is_not_accepted_changes_nothing_for_the_others() -> None:
    jobs = Scheduler(2)
    queue(jobs, job("a", "arm", generation=1))
    run(jobs)
    queue(jobs, job("b", "arm", generation=1, preempt="none"))
    bad = job("c", "arm", generation=9, priority=9, preempt="lower")
    jobs.arrive(bad, 1.0)
    running = jobs.running
    assert running
    assert running.stop is None
    assert jobs.remove(bad), "the clerk refused it"
    assert [one.request.id for one in jobs.jobs()] == ["a", "b"]
    assert queue(jobs, job("d", "arm", generation=2)) == [("b", "stale")], "9 was never seen"
    assert running.stop == "preempted"


def test_a_plan_that_is_checked_makes_way_for_no_earlier_one() -> None:
    jobs = Scheduler(4)
    first, second = job("a", "arm", generation=2), job("b", "arm", generation=1)
    for one in (first, second):
        jobs.arrive(one, 1.0)
    assert accept(jobs, first) == []
    with pytest.raises(PlanError) as caught:
        jobs.accept(second, 1.0)
    assert caught.value.code == "stale", "a newer one was accepted since it came"
    assert first.state == "queued"


def test_plans_of_a_session_that_are_checked_take_one_place_and_are_bounded() -> None:
    jobs = Scheduler(2)
    queue(jobs, job("a", "leg"))
    run(jobs)
    flood = [job(f"{i}", "arm") for i in range(3)]
    for one in flood:
        jobs.arrive(one, 1.0)
    with pytest.raises(PlanError, match="wait"):
        jobs.arrive(job("3", "arm"), 1.0)
    queue(jobs, job("b", "foot"))
    with pytest.raises(PlanError, match="wait"):
        jobs.arrive(job("c", "hand"), 1.0)
    assert [accept(jobs, one) for one in flood] == [[], [("0", "preempted")], [("1", "preempted")]]
    assert [one.request.id for one in jobs.jobs()] == ["a", "2", "b"]


@pytest.mark.parametrize(("priority", "stop"), [(4, None), (5, None), (6, "preempted")])
def test_only_a_running_plan_of_lower_priority_is_preempted(
    priority: int, stop: str | None
) -> None:
    jobs = Scheduler(4)
    queue(jobs, job("a", "arm"))
    run(jobs)
    queue(jobs, job("b", "leg", priority=priority, preempt="lower"))
    running = jobs.running
    assert running
    assert running.stop == stop


def test_plans_for_an_older_world_are_stale() -> None:
    jobs = Scheduler(4)
    queue(jobs, job("a", "arm", generation=7, preempt="none"))
    assert queue(jobs, job("b", "arm", generation=8, preempt="none")) == [("a", "stale")]
    with pytest.raises(PlanError) as caught:
        jobs.arrive(job("c", "arm", generation=7), 1.0)
    assert (caught.value.code, caught.value.field) == ("stale", "generation")
    assert queue(jobs, job("d", "leg", generation=1)) == [], "another session, another count"


def test_the_session_that_was_silent_longest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thor_dflash.serving.server.scheduler.MAX_SESSIONS", 2)
    jobs = Scheduler(8)
    for id, session in (("a", "arm"), ("b", "leg"), ("c", "arm"), ("d", "foot")):
        queue(jobs, job(id, session, generation=7))
    with pytest.raises(PlanError, match="generation"):
        jobs.arrive(job("e", "arm", generation=6), 1.0)
    assert queue(jobs, job("f", "leg", generation=6)) == [("b", "preempted")], "and not stale"


def test_who_was_stopped_first_is_told_the_first_reason() -> None:
    jobs = Scheduler(4)
    queue(jobs, job("a", "arm"))
    run(jobs)
    running = jobs.running
    assert running
    running.stop = "cancelled"
    queue(jobs, job("b", "arm"))
    assert running.stop == "cancelled"


def test_an_id_in_use_is_refused_and_only_for_its_own_peer() -> None:
    jobs = Scheduler(4)
    queue(jobs, job("a"))
    with pytest.raises(PlanError, match="id must not be that of a request under way"):
        jobs.arrive(job("a", "other"), 1.0)
    assert queue(jobs, job("a", "other", peer=b"q")) == []


def test_deadlines_pass_in_the_queue_only() -> None:
    jobs = Scheduler(4)
    queue(jobs, job("a", deadline_ms=100), job("b", deadline_ms=50))
    run(jobs)
    assert jobs.first_deadline() == 0.05
    assert [one.request.id for one in jobs.expired(0.06)] == ["b"]
    assert [one.request.id for one in jobs.expired(0.2)] == ["b"], "a runs; the engine looks"


def test_of_jobs_with_the_same_id_that_of_the_session_is_found_and_there_ones_own() -> None:
    """Only the requests of one client have different ids."""
    jobs = Scheduler(4)
    own, other = job("1", "leg", peer=b"p"), job("1", "arm", peer=b"q")
    queue(jobs, own, other)
    assert jobs.find("1", own.peer, "arm") is other
    assert jobs.find("1", own.peer, "leg") is own
    assert jobs.find("1", own.peer, None) is own
    both = job("1", "arm", peer=b"r", preempt="none")
    queue(jobs, both)
    assert jobs.find("1", both.peer, "arm") is both


@settings(max_examples=200)
@given(
    st.integers(1, 8),
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 9), st.integers(0, 9)), max_size=60),
)
def test_every_job_leaves_once_and_no_more_wait_than_may(
    sessions: int, steps: list[tuple[int, int, int]]
) -> None:
    jobs, left, taken = Scheduler(3), list[str](), 0
    for number, (what, session, value) in enumerate(steps):
        checked = next((one for one in jobs.jobs() if one.state == "preparing"), None)
        if what < 3:
            preempt = ("none", "same_session", "lower")[what]
            world = None if value % 2 else number - value
            one = job(f"{number}", f"s{session % sessions}", priority=value, preempt=preempt,
                      generation=world)  # fmt: skip
            try:
                jobs.arrive(one, 1.0)
            except PlanError:
                continue
            taken += 1
        elif what < 5 and checked:
            try:
                left += [id for id, _ in accept(jobs, checked)]
            except PlanError:  # stale, or busy after all
                assert jobs.remove(checked)
                left.append(checked.request.id)
        elif what == 5 and checked:
            assert jobs.remove(checked)
            left.append(checked.request.id)
        elif what == 6 or jobs.running is None:
            run(jobs)
        else:
            running = jobs.running
            assert jobs.remove(running)
            assert not jobs.remove(running), "twice"
            left.append(running.request.id)
        checks = Counter(one.session for one in jobs.jobs() if one.state == "preparing")
        assert max(checks.values(), default=0) <= 4, "of one session, as many as there are places"
        settled = [one for one in jobs.jobs() if one.state != "preparing" and not one.stop]
        assert len(settled) <= 4, "one runs and three wait, whoever displaced whom"
    left += [one.request.id for one in jobs.jobs()]
    assert len(left) == len(set(left)) == taken


def test_waiting_makes_nobody_more_urgent() -> None:
    """A plan that more urgent ones keep overtaking waits until none is left, or until its deadline:
    waiting does not raise its priority.
    """
    jobs = Scheduler(2)
    low = job("low", priority=4, deadline_ms=60_000)
    queue(jobs, low)
    for turn in range(100):
        queue(jobs, job(f"{turn}", priority=5, at=float(turn)))
        assert run(jobs) == f"{turn}"
        assert jobs.running
        assert jobs.remove(jobs.running)
    assert jobs.expired(59.9) == []
    assert jobs.expired(60.0) == [low]
    assert run(jobs) == "low", "as soon as none is more urgent"
