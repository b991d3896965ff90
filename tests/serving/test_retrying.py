"""A plan that is sent again does not take the place of a later one of its session."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from waiting import PATIENCE_S

from thor_dflash.errors import PlanError
from thor_dflash.serving import wire
from thor_dflash.serving.aclient import AsyncPlanner
from thor_dflash.serving.client import Ask
from thor_dflash.serving.replies import Tries

OLD, NEW = Ask(prompt="old"), Ask(prompt="new")


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """What refused plans wait for, in place of the time after which they are sent again."""
    event = asyncio.Event()

    async def wait(planner: AsyncPlanner, tries: Tries, error: PlanError) -> None:
        tries.again(error)
        await event.wait()

    monkeypatch.setattr(AsyncPlanner, "_wait", wait)
    return event


async def outcome(plan: Awaitable[wire.Result]) -> str:
    try:
        return (await plan).finish_reason
    except PlanError as e:
        return e.code


async def until(what: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await what():
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("over", [False, True], ids=["running", "over"])
@pytest.mark.parametrize(
    ("old", "new", "then"),
    [
        (OLD, NEW, "preempted"),
        (OLD, Ask(prompt="new", preempt="none"), "preempted"),
        (Ask(prompt="old", session="arm"), Ask(prompt="new", session="arm"), "preempted"),
        (Ask(prompt="old", session="arm"), NEW, "stop"),
        (Ask(prompt="old", preempt="none"), NEW, "stop"),
    ],
    ids=["client", "polite", "named", "other", "patient"],
)
def test_a_plan_that_was_refused_does_not_displace_a_later_one(
    house: Any, again: asyncio.Event, old: Ask, new: Ask, then: str, over: bool
) -> None:
    server, held, load = house.held_later()

    async def main() -> None:
        async with AsyncPlanner(server.endpoints[0]) as planner:

            async def stat(name: str, code: str) -> bool:
                return bool((await planner.simple("stats"))[name].get(code))

            async def ready() -> bool:
                return bool((await planner.simple("health"))["ready"])

            async def running() -> bool:
                return bool(held.waiting.is_set())

            first = asyncio.create_task(outcome(planner.plan(old)))
            await until(lambda: stat("refused", "not_ready"))
            load.set()
            await until(ready)
            second = asyncio.create_task(outcome(planner.plan(new)))
            await until(running)
            if over:
                held.let()
                assert await second == "stop"
            again.set()
            held.let()
            assert (await first, await second) == (then, "stop")
            assert planner._waiting == {}, "no session is remembered for longer than its plans"

    asyncio.run(main())


def test_a_later_plan_that_no_server_took_displaces_nothing(
    house: Any, again: asyncio.Event
) -> None:
    server, held, load = house.held_later()

    async def main() -> None:
        async with AsyncPlanner(server.endpoints[0]) as planner:

            async def asked() -> bool:
                return bool((await planner.simple("stats"))["refused"].get("not_ready"))

            async def ready() -> bool:
                return bool((await planner.simple("health"))["ready"])

            first = asyncio.create_task(outcome(planner.plan(OLD)))
            await until(asked)
            assert await outcome(planner.plan(Ask(prompt="x" * 2**21))) == "too_large"
            load.set()
            await until(ready)
            again.set()
            held.let()
            assert await first == "stop"
            assert planner._waiting == {}

    asyncio.run(main())
