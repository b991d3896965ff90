"""The scheduler: which job runs next, which jobs a new plan displaces, and what is refused."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thor_dflash.core.errors import PlanError
from thor_dflash.serving.protocol import messages
from thor_dflash.serving.protocol.codec import JSON
from thor_dflash.serving.server.scheduler import CLAIM_S, Job, Peer, Scheduler, job_of


def job(id: str, session: str = "", at: float = 0.0, peer: bytes = b"p", **fields: Any) -> Job:
    """A plan that arrived at the time `at`, s. Its session is its id unless one is given."""
    request = messages.PlanRequest(id=id, prompt="x", session=session or id, **fields)
    return job_of(Peer((peer, b""), JSON, arrived=at), request)


def urgent(id: str, session: str = "", priority: int = 8) -> Job:
    return job(id, session, priority=priority, preempt="lower")


def put(id: str) -> Job:
    request = messages.PrefixPut(id=id, prefix_id=id, system="x")
    return job_of(Peer((b"p", b""), JSON), request)


def accept(scheduler: Scheduler, one: Job) -> list[tuple[str, str]]:
    """Accept a job that has arrived; the ids of those it displaced, with their error codes."""
    displaced = scheduler.accept(one, 850.0)
    assert all(scheduler.remove(old) for old, _ in displaced)
    one.state = "queued"
    return [(old.request.id, error.code) for old, error in displaced]


def queue(scheduler: Scheduler, *jobs: Job) -> list[tuple[str, str]]:
    """Let jobs arrive and accept each; returns all that were displaced."""
    out: list[tuple[str, str]] = []
    for one in jobs:
        scheduler.arrive(one, 850.0)
        out += accept(scheduler, one)
    return out


def refused(scheduler: Scheduler, one: Job, code: str = "busy") -> PlanError:
    before = scheduler.jobs()
    with pytest.raises(PlanError) as caught:
        scheduler.arrive(one, 850.0)
    assert caught.value.code == code
    assert scheduler.jobs() == before
    return caught.value


def run(scheduler: Scheduler) -> str | None:
    """Let the next job begin; its id, or None if none may begin."""
    one = scheduler.next()
    if one is None:
        return None
    one.state = "running"
    return one.request.id


def running(scheduler: Scheduler) -> Job:
    assert scheduler.running
    return scheduler.running


def run_all(scheduler: Scheduler) -> list[str]:
    order: list[str] = []
    while id := run(scheduler):
        order.append(id)
        assert run(scheduler) is None, "one at a time"
        assert scheduler.remove(running(scheduler))
    return order


def full(size: int, **priorities: int) -> Scheduler:
    """A scheduler with these plans, of which the first one, "runs", does."""
    scheduler = Scheduler(size)
    queue(scheduler, *(job(id, priority=priority) for id, priority in priorities.items()))
    assert run(scheduler) == "runs"
    return scheduler


def leave(scheduler: Scheduler, id: str) -> None:
    assert scheduler.remove(next(one for one in scheduler.jobs() if one.request.id == id))


def waiting(scheduler: Scheduler) -> list[str]:
    return [one.request.id for one in scheduler.waiting]


# --- order


def test_the_most_urgent_first_then_the_oldest() -> None:
    """A prefix has the priority of a plan that names none, 5."""
    scheduler = Scheduler(8)
    queue(scheduler, job("a", priority=4), put("put"), job("b"), job("c", priority=9))
    queue(scheduler, job("d", priority=9), job("e", priority=0))
    assert run_all(scheduler) == ["c", "d", "put", "b", "a", "e"]


def test_jobs_of_a_session_wait_for_the_images_of_an_older_one() -> None:
    """But for more urgent ones; and not if it has left."""
    scheduler = Scheduler(8)
    first = job("first", "arm", preempt="none")
    scheduler.arrive(first, 850.0)
    queue(scheduler, job("other"), job("second", "arm", preempt="none"))
    queue(scheduler, job("urgent", "arm", priority=6, preempt="none"))
    assert run_all(scheduler) == ["urgent", "other"]
    accept(scheduler, first)
    assert run_all(scheduler) == ["first", "second"]
    scheduler.arrive(gone := job("gone", "arm", preempt="none"), 850.0)
    queue(scheduler, job("third", "arm", preempt="none"))
    assert run_all(scheduler) == []
    assert scheduler.remove(gone)
    assert run_all(scheduler) == ["third"]


def test_waiting_makes_nobody_more_urgent_and_deadlines_pass_in_the_queue_only() -> None:
    scheduler = Scheduler(2)
    queue(scheduler, low := job("low", priority=4, deadline_ms=60_000))
    for turn in range(100):
        queue(scheduler, job(f"{turn}", deadline_ms=50, at=float(turn)))
        assert run(scheduler) == f"{turn}"
        assert scheduler.expired(turn + 0.06) == ([low] if turn >= 60 else []), "not the running"
        assert scheduler.remove(running(scheduler))
    assert scheduler.first_deadline() == 60.0
    assert run(scheduler) == "low", "as soon as none is more urgent"


# --- sessions and generations


def test_the_latest_of_a_session_wins() -> None:
    scheduler = Scheduler(1)
    queue(scheduler, job("a", "arm"))
    assert queue(scheduler, job("b", "arm")) == [("a", "preempted")]
    assert run(scheduler) == "b"
    queue(scheduler, job("c", "leg"))
    assert running(scheduler).stop is None
    assert queue(scheduler, job("d", "leg")) == [("c", "preempted")], "also in a full queue"
    refused(scheduler, job("e", "arm", preempt="none"))
    assert running(scheduler).stop is None, "a plan that was refused preempts nobody"
    assert queue(scheduler, job("f", "arm")) == [], "it takes the place of the one that runs"
    assert running(scheduler).stop == "preempted"
    refused(scheduler, job("g", "foot"))
    assert scheduler.remove(running(scheduler))
    assert [run(scheduler), *waiting(scheduler)] == ["d", "f"]


def test_plans_for_an_older_world_are_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thor_dflash.serving.server.scheduler.MAX_SESSIONS", 2)
    scheduler = Scheduler(8)
    queue(scheduler, job("a", "arm", generation=7, preempt="none"))
    assert queue(scheduler, job("b", "arm", generation=8, preempt="none")) == [("a", "stale")]
    assert refused(scheduler, job("c", "arm", generation=7), "stale").field == "generation"
    assert queue(scheduler, job("d", "leg", generation=1)) == [], "another session"
    for one in (first := job("e", "hand", generation=2), second := job("f", "hand", generation=1)):
        scheduler.arrive(one, 1.0)
    assert accept(scheduler, first) == []
    with pytest.raises(PlanError) as caught:
        scheduler.accept(second, 1.0)
    assert caught.value.code == "stale", "a newer one was accepted since it came"
    # The session that was silent longest is forgotten.
    assert queue(scheduler, job("g", "arm", generation=6)) == [("b", "preempted")]


def test_plans_of_a_session_that_are_checked_take_one_place_and_are_bounded() -> None:
    scheduler = Scheduler(2)
    queue(scheduler, job("a", "leg"))
    run(scheduler)
    flood = [job(f"{i}", "arm") for i in range(3)]
    for one in flood:
        scheduler.arrive(one, 1.0)
    refused(scheduler, job("3", "arm"))
    queue(scheduler, job("b", "foot"))
    refused(scheduler, job("c", "hand"))
    displaced = [accept(scheduler, one) for one in flood]
    assert displaced == [[], [("0", "preempted")], [("1", "preempted")]]
    assert [one.request.id for one in scheduler.jobs()] == ["a", "2", "b"]


# --- a full queue


def test_a_full_queue_is_busy() -> None:
    scheduler = Scheduler(2)
    queue(scheduler, job("a"), job("b"), job("c"))
    for _ in range(2):
        assert refused(scheduler, job("d")).retry_after_ms == 850.0
        run(scheduler)  # the three places are taken whether or not one of the plans already runs
    leave(scheduler, "a")
    assert queue(scheduler, job("d")) == []


def test_a_full_queue_has_a_place_for_one_that_may_displace_less_urgent_ones() -> None:
    scheduler = full(3, runs=9, a=3, b=5, c=3)
    for fields in ({}, {"preempt": "same_session"}, {"priority": 3, "preempt": "lower"}):
        refused(scheduler, job("x", **{"priority": 9, **fields}))
    for id, priority, displaced in (("d", 4, "c"), ("e", 6, "a"), ("f", 6, "d"), ("g", 6, "b")):
        assert queue(scheduler, urgent(id, priority=priority)) == [(displaced, "preempted")]
    refused(scheduler, urgent("h", priority=6))
    assert running(scheduler).stop is None
    assert waiting(scheduler) == ["e", "f", "g"]


@pytest.mark.parametrize(("priority", "stop"), [(4, None), (5, None), (6, "preempted")])
def test_only_a_running_plan_of_lower_priority_is_preempted(
    priority: int, stop: str | None
) -> None:
    scheduler = full(4, runs=5)
    queue(scheduler, urgent("b", priority=priority))
    assert running(scheduler).stop == stop


def test_where_the_place_is_gone_when_a_plan_was_checked_it_is_busy_after_all() -> None:
    """When c came, it would have preempted the running plan, and the newer generation of d would
    have displaced a. When c was checked, the running plan had ended, and a ran in its place.
    """
    scheduler = full(2, runs=5)
    old = job("a", "arm", priority=9, preempt="none", generation=1)
    queue(scheduler, old, job("b", priority=9))
    new = job("d", "arm", priority=7, preempt="none", generation=2)
    for one in (new, last := urgent("c", priority=6)):
        scheduler.arrive(one, 1.0)
    leave(scheduler, "runs")
    assert run(scheduler) == "a"
    assert accept(scheduler, new) == []
    with pytest.raises(PlanError) as caught:
        scheduler.accept(last, 850.0)
    assert (caught.value.code, caught.value.retry_after_ms) == ("busy", 850.0)
    assert old.stop is None
    assert scheduler.remove(last)
    assert waiting(scheduler) == ["b", "d"]


def test_prefixes_are_not_displaced_and_take_no_place_while_the_disk_is_waited_for() -> None:
    scheduler = Scheduler(2)
    for id in "pqr":
        queue(scheduler, put(id))
        assert run(scheduler) == id
        assert refused(scheduler, put("s")).retry_after_ms == 850.0 if id == "r" else True
        running(scheduler).state = "writing"
    refused(scheduler, put("s"))
    queue(scheduler, job("runs", priority=9), job("a", priority=3), job("b"))
    assert run(scheduler) == "runs"
    assert waiting(scheduler) == ["a", "b"]
    refused(scheduler, job("c"))
    assert queue(scheduler, urgent("d")) == [("a", "preempted")]
    scheduler = full(1, runs=9)
    queue(scheduler, put("put"))
    refused(scheduler, urgent("c", priority=9))


# --- ids


def test_an_id_in_use_is_refused_and_only_for_its_own_peer() -> None:
    scheduler = Scheduler(4)
    queue(scheduler, job("a"))
    assert refused(scheduler, job("a", "other"), "bad_request").field == "id"
    assert queue(scheduler, job("a", "other", peer=b"q")) == []


@settings(max_examples=200)
@given(
    st.integers(1, 8),
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 9), st.integers(0, 9)), max_size=60),
)
def test_every_job_leaves_once_and_no_more_wait_than_may(
    sessions: int, steps: list[tuple[int, int, int]]
) -> None:
    scheduler, left, taken = Scheduler(3), list[str](), 0
    for number, (what, session, value) in enumerate(steps):
        checked = next((one for one in scheduler.jobs() if one.state == "preparing"), None)
        if what < 3:
            preempt = ("none", "same_session", "lower")[what]
            world = None if value % 2 else max(0, number - value)
            one = job(f"{number}", f"s{session % sessions}", priority=value, preempt=preempt,
                      generation=world)  # fmt: skip
            try:
                scheduler.arrive(one, 1.0)
            except PlanError:
                continue
            taken += 1
        elif what < 5 and checked:
            try:
                left += [id for id, _ in accept(scheduler, checked)]
            except PlanError:  # stale, or busy after all
                assert scheduler.remove(checked)
                left.append(checked.request.id)
        elif what == 5 and checked:
            assert scheduler.remove(checked)
            left.append(checked.request.id)
        elif what == 6 or scheduler.running is None:
            run(scheduler)
        else:
            over = running(scheduler)
            assert scheduler.remove(over)
            assert not scheduler.remove(over), "twice"
            left.append(over.request.id)
        checks = Counter(one.session for one in scheduler.jobs() if one.state == "preparing")
        assert max(checks.values(), default=0) <= 4, "of one session, as many as there are places"
        settled = [one for one in scheduler.jobs() if one.state != "preparing" and not one.stop]
        assert len(settled) <= 4, "one runs and three wait, whoever displaced whom"
    left += [one.request.id for one in scheduler.jobs()]
    assert len(left) == len(set(left)) == taken


# --- a share for each client


def tries(greedy_priority: int, other_priority: int, places: int = 5) -> tuple[int, int]:
    """One client asks for more plans than there are places, each in a session of its own; another
    asks for one at a time. How often the other got a place, and how often it was busy.
    """
    scheduler, got = Scheduler(places - 1), {"other": 0, "busy": 0}

    def offer(one: Job) -> bool:
        with suppress(PlanError):
            queue(scheduler, one)
        return one in scheduler.jobs()

    for turn in range(26):
        for n in range(places):
            offer(job(f"g{turn}.{n}", at=turn, peer=b"greedy", priority=greedy_priority))
        if not any(one.peer.routing == b"other" for one in scheduler.jobs()):
            done = offer(job(f"o{turn}", at=turn, peer=b"other", priority=other_priority))
            got["other" if done else "busy"] += 1
        assert run(scheduler) is not None
        assert scheduler.running
        scheduler.remove(scheduler.running)
    return got["other"], got["busy"]


@pytest.mark.parametrize("priority", [5, 9])
def test_a_client_with_many_sessions_does_not_keep_out_an_equally_urgent_one(priority: int) -> None:
    served, busy = tries(priority, priority)
    assert busy == 1, "before it, nobody had been refused"
    assert served >= 8


def test_urgency_goes_before_shares() -> None:
    served, busy = tries(9, 5)
    assert busy > served


def test_every_place_may_be_taken_while_nobody_is_refused() -> None:
    scheduler = Scheduler(3)
    queue(scheduler, *(job(f"{n}", peer=b"a") for n in range(4)))
    assert len(scheduler) == 4


def test_a_share_is_left_to_those_alone_who_may_come_back() -> None:
    for leave in (True, False):
        scheduler = Scheduler(3)
        queue(scheduler, *(job(f"{n}", peer=b"a") for n in range(4)))
        refused(scheduler, job("o", peer=b"b"))
        if leave:
            scheduler.forget(lambda peer: peer.routing == b"b")
        scheduler.remove(scheduler.jobs()[0])
        late = job("late", peer=b"a", at=0.0 if leave else CLAIM_S + 1)
        queue(scheduler, late)
        assert late in scheduler.jobs()


def test_a_newer_plan_of_a_session_needs_no_further_share() -> None:
    scheduler = Scheduler(1)
    queue(scheduler, job("a", "s", peer=b"a"), job("b", peer=b"a"))
    refused(scheduler, job("o", peer=b"b"))
    scheduler.remove(scheduler.jobs()[1])
    assert queue(scheduler, job("c", "s", peer=b"a")) == [("a", "preempted")]
    refused(scheduler, job("d", peer=b"a"))
    queue(scheduler, job("o", peer=b"b"))
