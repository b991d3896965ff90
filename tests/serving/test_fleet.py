"""Several servers as one, without servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any, cast

import pytest

from thor_dflash.errors import Code, PlanError
from thor_dflash.serving import fleet as fleet_module
from thor_dflash.serving import replies
from thor_dflash.serving.client import Ask, Options, Result
from thor_dflash.serving.fleet import Fleet, Member, _look_after


@dataclass
class Slow:
    """A planner that thinks for a while and then refuses, or answers."""

    takes_s: float
    refuses: bool = True
    code: Code = "busy"
    asked: list[Ask] = field(default_factory=list[Ask])

    async def stream(self, ask: Ask) -> AsyncIterator[Any]:
        self.asked.append(ask)
        await asyncio.sleep(self.takes_s)
        if self.refuses:
            raise PlanError(self.code, "later")
        yield Result(finish_reason="stop")


@dataclass
class Open:
    """A planner whose plans last until it is closed."""

    closed: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[Ask] = field(default_factory=list[Ask])

    async def stream(self, ask: Ask) -> AsyncIterator[Any]:
        if not self.closed.is_set():
            self.asked.append(ask)
        await self.closed.wait()
        raise replies.closed("here")
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
        return {"model": {"model": self.name}, "limits": {"max_message": len(self.name)}}


def fleet_of(*planners: Any) -> Fleet:
    fleet = object.__new__(Fleet)
    fleet.members = [Member(f"{i}", planner) for i, planner in enumerate(planners)]
    return fleet


def answer(ask: Ask, *planners: Slow) -> list[Any]:
    fleet = fleet_of(*planners)

    async def events() -> list[Any]:
        return [event async for event in fleet.stream(ask)]

    return asyncio.run(events())


def test_the_next_server_gets_what_is_left_of_the_deadline() -> None:
    first, second, third = Slow(0.02), Slow(0.02), Slow(0.0, refuses=False)
    (event,) = answer(Ask(prompt="x", deadline_ms=60_000), first, second, third)
    assert event.finish_reason == "stop"
    left = [planner.asked[0].deadline_ms or 0 for planner in (first, second, third)]
    assert left[0] <= 60_000
    assert left[1] <= left[0] - 19
    assert left[2] <= left[1] - 19


def test_nothing_is_asked_when_the_deadline_has_passed() -> None:
    first, second = Slow(0.02), Slow(0.0, refuses=False)
    with pytest.raises(PlanError) as caught:
        answer(Ask(prompt="x", deadline_ms=10), first, second)
    assert caught.value.code == "deadline"
    assert (len(first.asked), second.asked) == (1, [])


@pytest.mark.parametrize("others", [("unreachable", "unreachable"), ("unreachable", "draining")])
def test_a_refusal_says_more_than_a_server_that_is_not_there(others: tuple[Code, ...]) -> None:
    for codes in set(permutations(("busy", *others))):
        planners = [Slow(0.0, code=code) for code in codes]
        with pytest.raises(PlanError) as caught:
            answer(Ask(prompt="x"), *planners)
        assert caught.value.code == next(code for code in codes if code != "unreachable")
        assert [len(planner.asked) for planner in planners] == [1, 1, 1]


def test_without_a_deadline_none_is_made_up() -> None:
    first, second = Slow(0.0), Slow(0.0, refuses=False)
    answer(Ask(prompt="x"), first, second)
    assert second.asked == [Ask(prompt="x")]


def test_a_server_that_was_away_is_met_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "LOOK_S", 0.0)
    changing = Changing()
    member = Member("here", cast("Any", changing))

    async def main() -> None:
        task = asyncio.ensure_future(_look_after(member))
        for ready, name in ((True, "first"), (False, "first"), (True, "second"), (True, "second")):
            changing.ready, changing.name, seen = ready, name, changing.looks
            while changing.looks < seen + 3:
                await asyncio.sleep(0)
            assert (member.ready, member.model) == (ready, name)
        task.cancel()

    asyncio.run(main())
    assert (changing.met, changing.options.max_message) == (2, len("second"))


def test_closing_takes_no_plan_from_one_server_to_the_next() -> None:
    first, second = Open(), Open()
    fleet = fleet_of(first, second)

    async def main() -> None:
        plan = asyncio.ensure_future(anext(fleet.stream(Ask(prompt="x"))))
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
