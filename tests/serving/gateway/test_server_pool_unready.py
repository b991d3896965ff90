"""Plans for servers whose last health check found them not ready: they are greeted first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from thor_dflash.core.errors import PlanError
from thor_dflash.serving.client import Options, PlanRequest, Result
from thor_dflash.serving.gateway import server_pool as fleets
from thor_dflash.serving.gateway.server_pool import Member, ServerPool, _ActivePlan, _look_after


@dataclass
class Server:
    """A planner of a server with a model; `hangs`: it takes what it is sent and says nothing."""

    name: str
    hangs: bool = False
    ready: bool = True
    options: Options = field(default_factory=Options)
    asked: list[PlanRequest] = field(default_factory=list[PlanRequest])

    async def simple(self, op: str) -> dict[str, Any]:
        if self.hangs:
            await asyncio.sleep(60)
        if op == "health":
            return {"ready": self.ready}
        limits = {"max_message": 9}
        return {"model": {"model": self.name}, "limits": limits, "prefixes": []}

    async def stream(self, ask: PlanRequest) -> AsyncIterator[Any]:
        self.asked.append(ask)
        if self.hangs:
            await asyncio.sleep(60)
        yield Result(finish_reason="stop")


def fleet_of(*members: Member) -> ServerPool:
    fleet = object.__new__(ServerPool)
    fleet._turns, fleet.members = [], list(members)
    return fleet


async def answered(fleet: ServerPool, ask: PlanRequest, model: str = "") -> list[tuple[str, Any]]:
    return [(member.model, event) async for member, event in fleet.stream(ask, model)]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "SOON_S", 0.05)


def test_a_server_that_came_back_with_another_model_gets_no_plan_for_the_old_one() -> None:
    server = Server("new")
    fleet = fleet_of(Member("a", server, model="old", unsure=True))  # type: ignore[arg-type]
    with pytest.raises(PlanError):
        asyncio.run(answered(fleet, PlanRequest(prompt="x"), "old"))
    assert server.asked == []
    assert not fleet.serves("old")
    assert [name for name, _ in asyncio.run(answered(fleet, PlanRequest(prompt="x")))] == ["new"]


def test_a_session_leaves_a_server_that_hangs() -> None:
    async def run() -> None:
        stuck, free = Server("m", hangs=True), Server("m")
        home = Member("a", stuck, model="m", unsure=True)  # type: ignore[arg-type]
        fleet = fleet_of(home, Member("b", free, model="m", ready=True))  # type: ignore[arg-type]
        ask = PlanRequest(prompt="x", session="arm")
        fleet._turns.append(_ActivePlan(ask, "", 0.0, home))  # the session's plan before
        [(_, event)] = await answered(fleet, ask)
        assert event.finish_reason == "stop"
        assert (len(stuck.asked), len(free.asked)) == (0, 1)

    asyncio.run(asyncio.wait_for(run(), 10))


@pytest.mark.parametrize(("ready", "hangs"), [(True, False), (False, False), (True, True)])
def test_a_look_tells_whether_a_server_is_sure(ready: bool, hangs: bool) -> None:
    async def run() -> None:
        server = Server("m", hangs=hangs, ready=ready)
        member = Member("a", server)  # type: ignore[arg-type]
        assert not member.unsure
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fleets, "LOOK_S", 0.01)
            if hangs:
                patch.setattr(fleets, "_simple", silent)
            look = asyncio.create_task(_look_after(member))
            await asyncio.sleep(0.1)
            look.cancel()
        assert (member.ready, member.unsure) == (ready and not hangs, not ready or hangs)

    async def silent(member: Member, op: str) -> None:
        """As after the planner's own limit of time."""

    asyncio.run(run())
