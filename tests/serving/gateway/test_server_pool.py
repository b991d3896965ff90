"""Several servers as one: which of them gets a plan, and the error if none takes it. Fakes take the
place of the clients of the servers.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec import structs

from thor_dflash.core.errors import Code, PlanError
from thor_dflash.serving.client import Options, PlanRequest, Result, connection
from thor_dflash.serving.gateway import server_pool
from thor_dflash.serving.gateway.server_pool import Member, ServerPool, _ActivePlan, _look_after

ARM, LEG = PlanRequest(prompt="x", session="arm"), PlanRequest(prompt="x", session="leg")
SKILLS = PlanRequest(prompt="x", prefix_id="skills")


@dataclass
class Fake:
    """A client of a server. It refuses with `code`, or answers after `takes_s` seconds."""

    code: Code | None = None
    takes_s: float = 0.0
    name: str = "mock"
    ready: bool = True
    hangs: bool = False
    """Whether the server takes what it is sent and is silent."""
    requests: list[PlanRequest] = field(default_factory=list[PlanRequest])
    calls: list[str] = field(default_factory=list[str])
    options: Options = field(default_factory=Options)

    async def stream(self, request: PlanRequest) -> AsyncIterator[Any]:
        self.requests.append(request)
        await asyncio.sleep(60 if self.hangs else self.takes_s)
        if self.code is not None:
            raise PlanError(self.code, "", field="prefix_id" if request.prefix_id else None)
        yield Result(finish_reason="stop")

    async def simple(self, op: str) -> dict[str, Any]:
        self.calls.append(op)
        if self.hangs:
            await asyncio.sleep(60)
        if self.code is not None:
            raise PlanError(self.code, op)
        if op == "health":
            return {"ready": self.ready}
        limits = {"max_message": len(self.name)}
        prefixes = [{"prefix_id": self.name}]
        return {"model": {"model": self.name}, "limits": limits, "prefixes": prefixes}


@dataclass
class Open:
    """A client whose plans last until it is closed, and whose server takes at most `takes`."""

    closed: asyncio.Event = field(default_factory=asyncio.Event)
    requests: list[PlanRequest] = field(default_factory=list[PlanRequest])
    takes: int = 9

    async def stream(self, request: PlanRequest) -> AsyncIterator[Any]:
        if len(self.requests) == self.takes:
            raise PlanError("draining", "no more")
        if not self.closed.is_set():
            self.requests.append(request)
        await self.closed.wait()
        raise connection.client_closed("here")
        yield

    async def close(self) -> None:
        self.closed.set()
        await turns()


def pool_of(*planners: Any, **fields: Any) -> ServerPool:
    pool = object.__new__(ServerPool)
    pool._active = []
    pool._readers = OrderedDict()
    pool.members = [
        Member(f"{i}", planner, **{"model": "mock", **fields}) for i, planner in enumerate(planners)
    ]
    return pool


def answer(pool: ServerPool, request: PlanRequest, model: str = "") -> list[tuple[str, Any]]:
    async def events() -> list[Any]:
        stream = pool.stream(request, model)
        return [(member.model, event.finish_reason) async for member, event in stream]

    return asyncio.run(asyncio.wait_for(events(), 20))


def refusal(pool: ServerPool, request: PlanRequest, model: str = "") -> str:
    with pytest.raises(PlanError) as caught:
        answer(pool, request, model)
    return caught.value.code


def test_the_deadline_counts_for_all_servers() -> None:
    planners = [Fake("busy", 0.02), Fake("busy", 0.02), Fake()]
    answer(pool_of(*planners), PlanRequest(prompt="x", deadline_ms=60_000))
    left = [planner.requests[0].deadline_ms or 0 for planner in planners]
    assert 60_000 >= left[0] >= left[1] + 19 >= left[2] + 38
    planners = [Fake("busy", 0.02), Fake()]
    assert refusal(pool_of(*planners), PlanRequest(prompt="x", deadline_ms=10)) == "deadline"
    assert planners[1].requests == []


def begin(pool: ServerPool, request: PlanRequest) -> asyncio.Task[Any]:
    async def first() -> None:
        await anext(pool.stream(request))

    return asyncio.create_task(first())


async def turns() -> None:
    """Let the tasks that were begun run until all of them wait."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_session_stays_where_it_has_plans_and_no_longer() -> None:
    planners = [Open(), Open(), Open()]
    pool = pool_of(*planners)

    async def main() -> None:
        tasks: list[asyncio.Task[Any]] = []
        for number, request in enumerate((ARM, LEG, ARM, ARM, LEG)):
            pool.members[2].ready = number > 1  # changes nothing
            tasks.append(begin(pool, request))
            await turns()
        assert [planner.requests for planner in planners] == [[ARM] * 3, [LEG] * 2, []]
        for task in tasks:
            task.cancel()
        await turns()
        begin(pool, ARM)
        await turns()
        assert planners[2].requests == [ARM]
        await pool.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("code", "elsewhere"),
    [("busy", 0), ("draining", 1), ("not_ready", 1), ("unreachable", 1)],
)
def test_a_session_goes_elsewhere_only_where_its_own_server_takes_no_plans(
    code: Code, elsewhere: int
) -> None:
    home, other = Fake(code), Fake()
    pool = pool_of(other, home)
    pool._active = [_ActivePlan(ARM, "", 0.0, pool.members[1])]
    with suppress(PlanError):
        answer(pool, ARM)
    assert (len(home.requests), len(other.requests)) == (1, elsewhere)
    answer(pool, LEG)
    assert len(other.requests) == elsewhere + 1


def test_a_plan_that_ended_its_server_does_not_end_the_next() -> None:
    class Ending(Fake):
        async def stream(self, request: PlanRequest) -> AsyncIterator[Any]:
            self.requests.append(request)
            raise connection.unreachable("here", 0, sent=True)
            yield

    servers = Ending(), Ending()
    assert refusal(pool_of(*servers), ARM) == "unreachable"
    assert [len(server.requests) for server in servers] == [1, 0]


@pytest.mark.parametrize(("over", "servers"), [(False, 1), (True, 2), (False, 2)])
def test_a_plan_that_lost_its_server_displaces_no_later_one_of_its_session(
    over: bool, servers: int
) -> None:
    first, second = Open(takes=1), Open()
    pool = pool_of(*(first, second)[:servers])

    async def main() -> None:
        old = begin(pool, ARM)
        await turns()
        new = begin(pool, ARM)
        await turns()
        if over:
            new.cancel()
        first.closed.set()
        with pytest.raises(PlanError) as caught:
            await asyncio.wait_for(old, 20)
        assert caught.value.code == "preempted"
        assert (len(first.requests), len(second.requests)) == (1, servers - 1)
        new.cancel()
        await asyncio.gather(new, return_exceptions=True)  # else its error is printed some time
        await pool.close()

    asyncio.run(main())


def test_a_prefix_is_looked_for_where_it_is_listed_and_then_everywhere() -> None:
    without, having = Fake("bad_request"), Fake()
    pool = pool_of(without, having)
    pool.members[1].active = 1
    pool.members[1].prefixes = frozenset({"skills"})
    answer(pool, SKILLS)
    assert (len(without.requests), len(having.requests)) == (0, 1)
    pool.members[1].prefixes = frozenset()  # as before its first health check
    answer(pool, SKILLS)
    assert (len(without.requests), len(having.requests)) == (1, 2)


def test_a_conversation_stays_where_it_was_read_unless_others_are_less_busy() -> None:
    one, other = Fake(), Fake()
    pool = pool_of(one, other)
    talk = PlanRequest(prompt="x", conversation="talk", cache_scope="a")

    def asked(request: PlanRequest) -> tuple[int, int]:
        answer(pool, request)
        return len(one.requests), len(other.requests)

    pool.members[0].active = 1
    assert asked(talk) == (0, 1)
    pool.members[0].active = 0
    assert asked(talk) == (0, 2)
    assert asked(structs.replace(talk, cache_scope="b")) == (1, 2)
    assert asked(PlanRequest(prompt="x")) == (2, 2)
    pool.members[1].active = 1
    assert asked(talk) == (3, 2)
    pool.members[1].active = 0
    assert asked(talk) == (4, 2)
    for i in range(server_pool.MAX_CONVERSATIONS + 5):
        pool._remember(PlanRequest(conversation=str(i)), pool.members[0])
    assert len(pool._readers) == server_pool.MAX_CONVERSATIONS


# --- health checks


def test_a_control_operation_waits_for_no_server_that_hangs(monkeypatch: Any) -> None:
    monkeypatch.setattr(server_pool, "SOON_S", 0.01)
    pool = pool_of(Fake(hangs=True), Fake(), Fake(hangs=True))
    found = asyncio.run(asyncio.wait_for(pool.everywhere("health"), 20))
    assert [health for _, health in found] == [None, {"ready": True}, None]


def look(member: Member, fake: Fake) -> None:
    """Let the health check of a member look a few times."""

    async def main() -> None:
        task = asyncio.ensure_future(_look_after(member))
        seen = len(fake.calls)
        async with asyncio.timeout(20):
            while len(fake.calls) < seen + 6:
                await asyncio.sleep(0)
        task.cancel()

    asyncio.run(main())


def test_a_server_is_met_again_with_each_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have restarted between two looks, with another model and other limits."""
    monkeypatch.setattr(server_pool, "LOOK_S", 0.0)
    fake = Fake()
    member = Member("here", fake)  # type: ignore[arg-type]
    for name in ("first", "second"):
        fake.name = name
        look(member, fake)
        assert (member.ready, member.model, member.unsure) == (True, name, False)
        assert member.prefixes == {name}
        assert fake.options.max_message == len(name)
    fake.ready = False
    look(member, fake)
    assert (member.ready, member.unsure) == (False, True)


def test_a_server_that_came_back_with_another_model_gets_no_plan_for_the_old_one() -> None:
    fake = Fake(name="new")
    pool = pool_of(fake, model="old", unsure=True)
    assert refusal(pool, PlanRequest(prompt="x"), "old") == "unreachable"
    assert fake.requests == []
    assert not pool.serves("old")
    assert answer(pool, PlanRequest(prompt="x")) == [("new", "stop")]


def test_a_session_leaves_a_server_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pool, "SOON_S", 0.05)
    stuck, free = Fake(hangs=True), Fake()
    pool = pool_of(stuck, free)
    pool.members[0].unsure = True
    pool._active.append(_ActivePlan(ARM, "", 0.0, pool.members[0]))  # the session's plan before
    assert answer(pool, ARM) == [("mock", "stop")]
    assert (len(stuck.requests), len(free.requests)) == (0, 1)
