"""Several servers as one: which of them is asked for a plan, and what is answered if none takes it.
Stand-ins take the place of the clients of the servers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any, cast

import pytest

from thor_dflash.core.errors import Code, PlanError
from thor_dflash.serving.client import Options, PlanRequest, Result, connection
from thor_dflash.serving.gateway import server_pool as fleet_module
from thor_dflash.serving.gateway.server_pool import Member, ServerPool, _ActivePlan, _look_after


@dataclass
class Slow:
    """A planner that takes `takes_s` seconds and then refuses or answers."""

    takes_s: float
    refuses: bool = True
    code: Code = "busy"
    asked: list[PlanRequest] = field(default_factory=list[PlanRequest])

    async def stream(self, ask: PlanRequest) -> AsyncIterator[Any]:
        self.asked.append(ask)
        await asyncio.sleep(self.takes_s)
        if self.refuses:
            raise PlanError(self.code, "later")
        yield Result(finish_reason="stop")


@dataclass
class Open:
    """A planner whose plans last until it is closed, and that takes at most `takes` of them."""

    closed: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[PlanRequest] = field(default_factory=list[PlanRequest])
    takes: int = 9

    async def stream(self, ask: PlanRequest) -> AsyncIterator[Any]:
        if len(self.asked) == self.takes:
            raise PlanError("draining", "no more")
        if not self.closed.is_set():
            self.asked.append(ask)
        await self.closed.wait()
        raise connection.client_closed("here")
        yield

    async def close(self) -> None:
        self.closed.set()
        for _ in range(10):
            await asyncio.sleep(0)


@dataclass
class Changing:
    """A server that is restarted with another model and other limits."""

    options: Options = field(default_factory=Options)
    ready: bool = False
    name: str = ""
    looks: int = 0
    met: int = 0

    async def simple(self, op: str) -> dict[str, Any]:
        if op == "health":
            self.looks += 1
            return {"ready": self.ready}
        self.met += 1
        return {
            "model": {"model": self.name},
            "limits": {"max_message": len(self.name)},
            "prefixes": [{"prefix_id": self.name}],
        }


def fleet_of(*planners: Any) -> ServerPool:
    fleet = object.__new__(ServerPool)
    fleet._turns = []
    fleet.members = [Member(f"{i}", planner, model="mock") for i, planner in enumerate(planners)]
    return fleet


def answer(ask: PlanRequest, *planners: Slow) -> list[Any]:
    return answer_of(fleet_of(*planners), ask)


def answer_of(fleet: ServerPool, ask: PlanRequest) -> list[Any]:
    async def events() -> list[Any]:
        return [event async for _, event in fleet.stream(ask)]

    return asyncio.run(events())


def test_the_next_server_gets_what_is_left_of_the_deadline() -> None:
    first, second, third = Slow(0.02), Slow(0.02), Slow(0.0, refuses=False)
    (event,) = answer(PlanRequest(prompt="x", deadline_ms=60_000), first, second, third)
    assert event.finish_reason == "stop"
    left = [planner.asked[0].deadline_ms or 0 for planner in (first, second, third)]
    assert left[0] <= 60_000
    assert left[1] <= left[0] - 19
    assert left[2] <= left[1] - 19


def test_nothing_is_asked_when_the_deadline_has_passed() -> None:
    first, second = Slow(0.02), Slow(0.0, refuses=False)
    with pytest.raises(PlanError) as caught:
        answer(PlanRequest(prompt="x", deadline_ms=10), first, second)
    assert caught.value.code == "deadline"
    assert (len(first.asked), second.asked) == (1, [])


@pytest.mark.parametrize("others", [("unreachable", "unreachable"), ("unreachable", "draining")])
def test_a_refusal_says_more_than_a_server_that_is_not_there(others: tuple[Code, ...]) -> None:
    for codes in set(permutations(("busy", *others))):
        planners = [Slow(0.0, code=code) for code in codes]
        with pytest.raises(PlanError) as caught:
            answer(PlanRequest(prompt="x"), *planners)
        assert caught.value.code == next(code for code in codes if code != "unreachable")
        assert [len(planner.asked) for planner in planners] == [1, 1, 1]


def test_without_a_deadline_none_is_made_up() -> None:
    first, second = Slow(0.0), Slow(0.0, refuses=False)
    answer(PlanRequest(prompt="x"), first, second)
    assert second.asked == [PlanRequest(prompt="x")]


def test_a_server_that_has_answered_or_refused_is_as_free_as_before() -> None:
    first, second = Slow(0.0, refuses=False), Slow(0.0)
    fleet = fleet_of(first, second)
    for refuses in (False, True, False):
        first.refuses = refuses
        with suppress(PlanError):
            answer_of(fleet, PlanRequest(prompt="x"))
    assert (len(first.asked), len(second.asked)) == (3, 1), "of equals the first"


def begin(fleet: ServerPool, ask: PlanRequest) -> asyncio.Task[Any]:
    async def first() -> None:
        await anext(fleet.stream(ask))

    return asyncio.create_task(first())


async def turns() -> None:
    """Let the tasks that were begun run until all of them wait."""
    for _ in range(10):
        await asyncio.sleep(0)


ARM, LEG = PlanRequest(prompt="x", session="arm"), PlanRequest(prompt="x", session="leg")


def test_a_session_stays_where_it_has_plans_and_no_longer() -> None:
    planners = [Open(), Open(), Open()]
    fleet = fleet_of(*planners)

    async def main() -> None:
        tasks: list[asyncio.Task[Any]] = []
        for number, ask in enumerate((ARM, LEG, ARM, ARM, LEG)):
            # That another server is ready changes nothing.
            fleet.members[2].ready = number > 1
            tasks.append(begin(fleet, ask))
            await turns()
        assert [planner.asked for planner in planners] == [[ARM] * 3, [LEG] * 2, []]
        for task in tasks:
            task.cancel()
        await turns()
        assert fleet._turns == []
        begin(fleet, ARM)
        await turns()
        assert planners[2].asked == [ARM]
        await fleet.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("code", "elsewhere"),
    [("busy", 0), ("draining", 1), ("not_ready", 1), ("unreachable", 1)],
)
def test_a_session_goes_elsewhere_only_where_its_own_server_takes_no_plans(
    code: Code, elsewhere: int
) -> None:
    home, other = Slow(0.0, code=code), Slow(0.0, refuses=False)
    fleet = fleet_of(other, home)
    fleet._turns = [_ActivePlan(ARM, "", 0.0, fleet.members[1])]
    with suppress(PlanError):
        answer_of(fleet, ARM)
    assert (len(home.asked), len(other.asked)) == (1, elsewhere)
    answer_of(fleet, LEG)
    assert len(other.asked) == elsewhere + 1


@pytest.mark.parametrize("over", [False, True])
@pytest.mark.parametrize("servers", [1, 2])
def test_a_plan_that_lost_its_server_displaces_no_later_one_of_its_session(
    over: bool, servers: int
) -> None:
    first, second = Open(takes=1), Open()
    fleet = fleet_of(*(first, second)[:servers])

    async def main() -> None:
        old = begin(fleet, ARM)
        await turns()
        new = begin(fleet, ARM)
        await turns()
        if over:
            new.cancel()
        first.closed.set()
        with pytest.raises(PlanError) as caught:
            await asyncio.wait_for(old, 20)
        assert caught.value.code == "preempted"
        assert (len(first.asked), len(second.asked)) == (1, servers - 1)
        new.cancel()
        await asyncio.gather(new, return_exceptions=True)  # else its error is printed some time
        await fleet.close()

    asyncio.run(main())


@dataclass
class WithoutPrefix:
    """A planner that has no prefix."""

    message: str = "prefix_id must be a pinned prefix"
    asked: int = 0

    async def stream(self, ask: PlanRequest) -> AsyncIterator[Any]:
        self.asked += 1
        raise PlanError("bad_request", self.message, field="prefix_id")
        yield

    async def close(self) -> None:
        pass


SKILLS = PlanRequest(prompt="x", prefix_id="skills")


def test_a_prefix_is_looked_for_where_it_is_listed_and_then_everywhere() -> None:
    without, having = WithoutPrefix(), Slow(0.0, refuses=False)
    fleet = fleet_of(without, having)
    fleet.members[1].active = 1
    fleet.members[1].prefixes = frozenset({"skills"})
    answer_of(fleet, SKILLS)
    assert (without.asked, len(having.asked)) == (0, 1)
    fleet.members[1].prefixes = frozenset()  # as before its first health check
    answer_of(fleet, SKILLS)
    assert (without.asked, len(having.asked)) == (1, 2)


@pytest.mark.parametrize(
    ("code", "told"),
    [("busy", "busy"), ("draining", "draining"), ("unreachable", "bad_request")],
)
def test_a_missing_prefix_is_told_before_an_unreachable_server_and_after_others(
    code: Code, told: Code
) -> None:
    for planners in permutations((WithoutPrefix(), Slow(0.0, code=code), WithoutPrefix())):
        with pytest.raises(PlanError) as caught:
            answer_of(fleet_of(*planners), SKILLS)
        assert caught.value.code == told


def test_a_model_is_asked_of_its_own_servers_only() -> None:
    planners = [Slow(0.0), Slow(0.0), Slow(0.0)]
    fleet = fleet_of(*planners)
    for member, name in zip(fleet.members, ("a", "b", "a"), strict=True):
        member.model = name
    for name, asked in (("a", [1, 0, 1]), ("b", [1, 1, 1]), ("", [2, 2, 2])):
        with pytest.raises(PlanError, match="later"):
            asyncio.run(anext(fleet.stream(ARM, name)))  # type: ignore[arg-type]
        assert [len(planner.asked) for planner in planners] == asked


@dataclass
class Refusing:
    """A server that refuses to tell its model."""

    code: Code

    async def simple(self, op: str) -> dict[str, Any]:
        raise PlanError(self.code, op)


def test_a_model_is_unknown_only_when_all_have_said_what_they_have() -> None:
    met, new = Changing(), Changing(ready=True, name="new")
    fleet = fleet_of(met, new)
    fleet.members[1].model = ""
    assert asyncio.run(fleet.knows("mock"))
    assert new.met == 0  # not asked, since the first one has the model
    assert asyncio.run(fleet.knows("new"))
    assert not asyncio.run(fleet.knows("other"))
    assert (met.met, new.met) == (0, 1)


@pytest.mark.parametrize(
    ("codes", "told"),
    [(("unreachable",), "unreachable"), (("unreachable", "unauthorized"), "unauthorized")],
)
def test_no_model_is_unknown_while_a_server_has_not_told_its_own(
    codes: tuple[Code, ...], told: Code
) -> None:
    fleet = fleet_of(Changing(), *(Refusing(code) for code in codes))
    for member in fleet.members[1:]:
        member.model = ""
    assert asyncio.run(fleet.knows("mock"))
    with pytest.raises(PlanError) as caught:
        asyncio.run(fleet.knows("other"))
    assert caught.value.code == told


def test_a_server_is_met_again_with_each_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have restarted between two looks, so that none saw that it was away."""
    monkeypatch.setattr(fleet_module, "LOOK_S", 0.0)
    changing = Changing()
    member = Member("here", cast("Any", changing))

    async def main() -> None:
        task = asyncio.ensure_future(_look_after(member))
        for ready, name in ((True, "first"), (False, "first"), (True, "second"), (True, "third")):
            changing.ready, changing.name, seen = ready, name, changing.looks
            while changing.looks < seen + 3:
                await asyncio.sleep(0)
            assert (member.ready, member.model) == (ready, name)
            assert member.prefixes == {name}
        task.cancel()

    asyncio.run(main())
    assert changing.options.max_message == len("third")


def test_closing_takes_no_plan_from_one_server_to_the_next() -> None:
    first, second = Open(), Open()
    fleet = fleet_of(first, second)

    async def main() -> None:
        plan = asyncio.ensure_future(anext(fleet.stream(PlanRequest(prompt="x"))))
        while not first.asked:
            await asyncio.sleep(0)
        await fleet.close()
        with pytest.raises(PlanError, match="the client was closed"):
            await plan

    asyncio.run(main())
    assert (len(first.asked), second.asked) == (1, [])


def test_who_asks_for_all_does_not_wait_for_one_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Gone(Changing):
        async def simple(self, op: str) -> dict[str, Any]:
            await asyncio.Event().wait()
            raise AssertionError(op)

    monkeypatch.setattr(fleet_module, "SOON_S", 0.01)

    async def main() -> list[Any]:
        async with asyncio.timeout(20):
            return await fleet_of(Gone(), Changing(ready=True), Gone()).everywhere("health")

    assert [health for _, health in asyncio.run(main())] == [None, {"ready": True}, None]
