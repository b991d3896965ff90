from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thor_dflash.errors import PlanError
from thor_dflash.serving import schedule, wire
from thor_dflash.serving.backend import Stop
from thor_dflash.serving.codec import JSON
from thor_dflash.serving.schedule import Job, Peer, Schedule


def job(id: str, session: str = "", at: float = 0.0, peer: bytes = b"p", **ask: Any) -> Job:
    request = wire.Ask(id=id, prompt="x", **ask)
    ms = request.deadline_ms
    return Job(
        request=request,
        peer=Peer((peer, b""), JSON),
        session=session or id,
        arrived=at,
        deadline=None if ms is None else at + ms / 1e3,
    )


def queue(books: Schedule, *jobs: Job) -> list[tuple[str, str]]:
    """Take jobs in, ready to run. Gives who was displaced and why."""
    out: list[tuple[str, str]] = []
    for one in jobs:
        books.arrive(one, 10.0)
        out += accept(books, one)
    return out


def accept(books: Schedule, one: Job) -> list[tuple[str, str]]:
    displaced = books.accept(one, 10.0)
    assert all(books.leave(old) for old, _ in displaced)
    one.state = "queued"
    return [(old.request.id, error.code) for old, error in displaced]


def run(books: Schedule) -> str | None:
    one = books.next()
    if one is None:
        return None
    one.state = "running"
    return one.request.id


def test_the_most_urgent_first_then_the_oldest() -> None:
    books = Schedule(8)
    queue(books, job("a"), job("b", priority=9), job("c", priority=9), job("d", priority=0))
    order: list[str | None] = []
    while id := run(books):
        order.append(id)
        running = books.running
        assert running
        assert run(books) is None, "one at a time"
        assert books.leave(running)
    assert order == ["b", "c", "a", "d"]


def test_waiting_makes_nobody_more_urgent() -> None:
    """It is its deadline that ends the wait of a plan that more urgent ones keep from its turn."""
    books = Schedule(2)
    low = job("low", priority=4, deadline_ms=60_000)
    queue(books, low)
    for turn in range(100):
        queue(books, job(f"{turn}", priority=5, at=float(turn)))
        assert run(books) == f"{turn}"
        assert books.running
        assert books.leave(books.running)
    assert books.expired(59.9) == []
    assert books.expired(60.0) == [low]
    assert run(books) == "low", "as soon as none is more urgent"


def test_a_full_queue_says_busy_and_when_to_come_again() -> None:
    books = Schedule(2)
    queue(books, job("a"), job("b"), job("c"))
    for _ in range(2):
        with pytest.raises(PlanError) as caught:
            books.arrive(job("d"), 850.0)
        assert (caught.value.code, caught.value.retry_after_ms) == ("busy", 850.0)
        assert len(books) == 3
        run(books)  # one of the three is the engine's: it makes no difference to the others
    assert books.leave(books.jobs()[0])
    assert queue(books, job("d")) == []


def test_the_latest_of_a_session_wins() -> None:
    books = Schedule(1)
    queue(books, job("a", "arm"))
    assert queue(books, job("b", "arm")) == [("a", "preempted")]
    assert run(books) == "b"
    running = books.running
    queue(books, job("c", "leg"))
    assert running
    assert running.stop is None
    assert queue(books, job("d", "leg")) == [("c", "preempted")], "also where the queue is full"
    with pytest.raises(PlanError, match="wait"):
        books.arrive(job("e", "arm", preempt="none"), 1.0)
    assert running.stop is None, "a plan that was refused preempts nobody"
    assert queue(books, job("f", "arm")) == [], "it takes the place of the one that runs"
    assert running.stop == "preempted"
    with pytest.raises(PlanError, match="wait"):
        books.arrive(job("g", "foot"), 1.0)
    assert books.leave(running)
    assert [run(books), *(one.request.id for one in books.waiting)] == ["d", "f"]


def test_the_latest_stops_the_running_one() -> None:
    books = Schedule(4)
    queue(books, job("a", "arm"))
    run(books)
    queue(books, job("b", "arm", preempt="none"))
    running = books.running
    assert running
    assert running.stop is None
    queue(books, job("c", "arm"))
    assert running.stop == "preempted"


def test_a_plan_that_is_not_accepted_changes_nothing_for_the_others() -> None:
    books = Schedule(2)
    queue(books, job("a", "arm", generation=1))
    run(books)
    queue(books, job("b", "arm", generation=1, preempt="none"))
    bad = job("c", "arm", generation=9, priority=9, preempt="lower")
    books.arrive(bad, 1.0)
    running = books.running
    assert running
    assert running.stop is None
    assert books.leave(bad), "the clerk refused it"
    assert [one.request.id for one in books.jobs()] == ["a", "b"]
    assert queue(books, job("d", "arm", generation=2)) == [("b", "stale")], "9 was never seen"
    assert running.stop == "preempted"


def test_a_plan_that_is_checked_makes_way_for_no_earlier_one() -> None:
    books = Schedule(4)
    first, second = job("a", "arm", generation=2), job("b", "arm", generation=1)
    for one in (first, second):
        books.arrive(one, 1.0)
    assert accept(books, first) == []
    with pytest.raises(PlanError) as caught:
        books.accept(second, 1.0)
    assert caught.value.code == "stale", "a newer one was accepted since it came"
    assert first.state == "queued"


def test_plans_of_a_session_that_are_checked_take_one_place_and_are_bounded() -> None:
    books = Schedule(2)
    queue(books, job("a", "leg"))
    run(books)
    flood = [job(f"{i}", "arm") for i in range(3)]
    for one in flood:
        books.arrive(one, 1.0)
    with pytest.raises(PlanError, match="wait"):
        books.arrive(job("3", "arm"), 1.0)
    queue(books, job("b", "foot"))
    with pytest.raises(PlanError, match="wait"):
        books.arrive(job("c", "hand"), 1.0)
    assert [accept(books, one) for one in flood] == [[], [("0", "preempted")], [("1", "preempted")]]
    assert [one.request.id for one in books.jobs()] == ["a", "2", "b"]


@pytest.mark.parametrize(("priority", "stop"), [(4, None), (5, None), (6, "preempted")])
def test_lower_means_lower(priority: int, stop: str | None) -> None:
    books = Schedule(4)
    queue(books, job("a", "arm"))
    run(books)
    queue(books, job("b", "leg", priority=priority, preempt="lower"))
    running = books.running
    assert running
    assert running.stop == stop


def full(books: Schedule, **priorities: int) -> None:
    queue(books, *(job(id, priority=priority) for id, priority in priorities.items()))
    assert run(books) == "runs"


def test_a_full_queue_makes_room_for_one_that_may_displace_less_urgent_ones() -> None:
    books = Schedule(3)
    full(books, runs=9, a=3, b=5, c=3)
    for ask in ({"priority": 9}, {"priority": 9, "preempt": "same_session"},
                {"priority": 3, "preempt": "lower"}):  # fmt: skip
        with pytest.raises(PlanError, match="plans that wait must be <= 3"):
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
    books = Schedule(2)
    full(books, runs=5, a=0, b=0)
    assert queue(books, job("c", priority=6, preempt="lower")) == []
    running = books.running
    assert running
    assert running.stop == "preempted"
    assert books.leave(running)
    assert run(books) == "c"


def urgent(id: str, session: str = "", priority: int = 8) -> Job:
    return job(id, session, priority=priority, preempt="lower")


def leave(books: Schedule, id: str) -> None:
    assert books.leave(next(one for one in books.jobs() if one.request.id == id))


def waiting(books: Schedule) -> list[str]:
    return [one.request.id for one in books.waiting]


def test_two_urgent_plans_under_check_have_a_place_each() -> None:
    books = Schedule(2)
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
def test_a_place_that_was_made_meanwhile_costs_nobody_hers(leaves: str) -> None:
    books = Schedule(2)
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
def test_a_running_plan_that_ends_already_is_place_enough(stop: Stop) -> None:
    books = Schedule(2)
    full(books, runs=9, a=1, b=9)
    assert books.running
    books.running.stop = stop
    assert queue(books, urgent("c", priority=5)) == []
    leave(books, "runs")
    assert waiting(books) == ["a", "b", "c"], "one of which is the engine's now"


def test_nobody_makes_way_for_those_who_are_still_under_check() -> None:
    books = Schedule(2)
    full(books, runs=9, a=1, b=9)
    books.arrive(one := urgent("c"), 1.0)
    leave(books, "b")
    books.arrive(other := job("d", priority=0), 1.0)
    assert accept(books, one) == []
    assert books.leave(other), "the clerk refused it"
    assert waiting(books) == ["a", "c"]


def test_who_counted_on_a_plan_that_was_refused_takes_another_place_or_none() -> None:
    books = Schedule(2)
    full(books, runs=9, a=1, b=9)
    books.arrive(one := urgent("c", "arm"), 1.0)
    with pytest.raises(PlanError, match="wait"):
        books.arrive(urgent("d"), 1.0)
    with pytest.raises(PlanError, match="wait"):
        books.arrive(job("e", "arm"), 1.0)  # who displaces c has no right to the place of a
    assert books.leave(one)
    assert queue(books, urgent("f")) == [("a", "preempted")]


def test_a_place_that_is_given_up_already_is_counted_once() -> None:
    books = Schedule(2)
    full(books, runs=9, a=1, b=9)
    books.arrive(urgent("c", "arm"), 1.0)
    leave(books, "a")  # whose place c counted on
    with pytest.raises(PlanError, match="wait"):
        books.arrive(job("d"), 1.0)
    leave(books, "b")
    books.arrive(job("e", "arm"), 1.0)  # who displaces c
    queue(books, job("f"))
    with pytest.raises(PlanError, match="wait"):
        books.arrive(job("g"), 1.0)


def test_who_is_displaced_under_check_displaces_nobody() -> None:
    books = Schedule(2)
    full(books, runs=9, a=1, b=9)
    books.arrive(urgent("c", "arm"), 1.0)  # in place of a
    leave(books, "b")
    books.arrive(job("d", "arm"), 1.0)  # in place of c
    with pytest.raises(PlanError, match="wait"):
        books.arrive(job("e"), 1.0)


def test_where_the_place_is_gone_when_a_plan_was_checked_it_is_busy_after_all() -> None:
    """The running plan would have made way for c, and a for one of a newer generation. By then the
    one has ended, and the other runs.
    """
    books = Schedule(2)
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
    with pytest.raises(PlanError, match="wait must be <= 2") as caught:
        books.accept(last, 850.0)
    assert (caught.value.code, caught.value.retry_after_ms) == ("busy", 850.0)
    assert old.stop is None
    assert books.leave(last)
    assert waiting(books) == ["b", "d"]


def test_a_prefix_that_is_to_be_pinned_is_no_plan_to_displace() -> None:
    books = Schedule(1)
    full(books, runs=9)
    put = wire.PrefixPut(id="put", prefix_id="skills", system="x")
    pinned = schedule.job_of(Peer((b"p", b""), JSON), put, 0.0)
    books.arrive(pinned, 1.0)
    pinned.state = "queued"
    with pytest.raises(PlanError, match="wait"):
        books.arrive(job("c", priority=9, preempt="lower"), 1.0)


def test_plans_for_an_older_world_are_stale() -> None:
    books = Schedule(4)
    queue(books, job("a", "arm", generation=7, preempt="none"))
    assert queue(books, job("b", "arm", generation=8, preempt="none")) == [("a", "stale")]
    with pytest.raises(PlanError) as caught:
        books.arrive(job("c", "arm", generation=7), 1.0)
    assert (caught.value.code, caught.value.field) == ("stale", "generation")
    assert queue(books, job("d", "leg", generation=1)) == [], "another session, another count"


def test_the_session_that_was_silent_longest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "SESSIONS", 2)
    books = Schedule(8)
    for id, session in (("a", "arm"), ("b", "leg"), ("c", "arm"), ("d", "foot")):
        queue(books, job(id, session, generation=7))
    with pytest.raises(PlanError, match="generation"):
        books.arrive(job("e", "arm", generation=6), 1.0)
    assert queue(books, job("f", "leg", generation=6)) == [("b", "preempted")], "and not stale"


def test_who_was_stopped_first_is_told_the_first_reason() -> None:
    books = Schedule(4)
    queue(books, job("a", "arm"))
    run(books)
    running = books.running
    assert running
    running.stop = "cancelled"
    queue(books, job("b", "arm"))
    assert running.stop == "cancelled"


def test_an_id_in_use_is_refused_and_only_for_its_own_peer() -> None:
    books = Schedule(4)
    queue(books, job("a"))
    with pytest.raises(PlanError, match="id must not be in use"):
        books.arrive(job("a", "other"), 1.0)
    assert queue(books, job("a", "other", peer=b"q")) == []


def test_deadlines_pass_in_the_queue_only() -> None:
    books = Schedule(4)
    queue(books, job("a", deadline_ms=100), job("b", deadline_ms=50))
    run(books)
    assert books.first_deadline() == 0.05
    assert [one.request.id for one in books.expired(0.06)] == ["b"]
    assert [one.request.id for one in books.expired(0.2)] == ["b"], "a runs; the engine looks"


def test_a_job_is_found_by_its_own_connection_or_by_name() -> None:
    books = Schedule(4)
    queue(books, job("a", "arm", peer=b"p"))
    assert books.find("a", b"p", None)
    assert books.find("a", b"q", "arm")
    assert not books.find("a", b"q", None)
    assert not books.find("a", b"q", "leg")
    assert not books.find("b", b"p", "arm")


@settings(max_examples=600)
@given(
    st.integers(1, 8),
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 9), st.integers(0, 9)), max_size=60),
)
def test_every_job_leaves_once_and_no_more_wait_than_may(
    sessions: int, steps: list[tuple[int, int, int]]
) -> None:
    books, left, taken = Schedule(3), list[str](), 0
    for number, (what, session, value) in enumerate(steps):
        checked = next((one for one in books.jobs() if one.state == "preparing"), None)
        if what < 3:
            preempt = ("none", "same_session", "lower")[what]
            world = None if value % 2 else number - value
            one = job(f"{number}", f"s{session % sessions}", priority=value, preempt=preempt,
                      generation=world)  # fmt: skip
            try:
                books.arrive(one, 1.0)
            except PlanError:
                continue
            taken += 1
        elif what < 5 and checked:
            try:
                left += [id for id, _ in accept(books, checked)]
            except PlanError:  # stale, or busy after all
                assert books.leave(checked)
                left.append(checked.request.id)
        elif what == 5 and checked:
            assert books.leave(checked)
            left.append(checked.request.id)
        elif what == 6 or books.running is None:
            run(books)
        else:
            running = books.running
            assert books.leave(running)
            assert not books.leave(running), "twice"
            left.append(running.request.id)
        assert len(books) <= 16, "a full house of sessions, each with its checks"
        settled = [one for one in books.jobs() if one.state != "preparing" and not one.stop]
        assert len(settled) <= 4, "one runs and three wait, whoever displaced whom"
    left += [one.request.id for one in books.jobs()]
    assert len(left) == len(set(left)) == taken
