"""A plan that is sent again does not take the place of a later one of its session; and how long a
client attempts.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs
from support.waiting import PATIENCE_S

from thor_dflash.core.bounds import IMAGES_BYTES
from thor_dflash.core.errors import ConfigError, PlanError
from thor_dflash.serving.client import AsyncPlanner, Options, PlanRequest
from thor_dflash.serving.client.retry import GRACE_S, Attempts, encode
from thor_dflash.serving.protocol import messages
from thor_dflash.serving.protocol.codec import JSON, MSGPACK, Codec

OLD, NEW = PlanRequest(prompt="old"), PlanRequest(prompt="new")


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """What refused plans wait for, in place of the time after which they are sent again."""
    event = asyncio.Event()

    async def wait(planner: AsyncPlanner, attempts: Attempts, error: PlanError) -> None:
        attempts.retry_delay(error)
        await event.wait()

    monkeypatch.setattr(AsyncPlanner, "_wait", wait)
    return event


async def outcome(plan: Awaitable[messages.Result]) -> str:
    try:
        return (await plan).finish_reason
    except PlanError as e:
        return e.code


async def until(what: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await what():
            await asyncio.sleep(0.002)


@pytest.mark.parametrize(
    ("old", "new", "over", "then"),
    [
        (OLD, NEW, True, "preempted"),
        (OLD, structs.replace(NEW, preempt="none"), False, "preempted"),
        (structs.replace(OLD, session="arm"), NEW, False, "stop"),
        (structs.replace(OLD, preempt="none"), NEW, True, "stop"),
    ],
    ids=["client", "polite", "other", "patient"],
)
def test_a_plan_that_was_refused_does_not_displace_a_later_one(
    house: Any, again: asyncio.Event, old: PlanRequest, new: PlanRequest, over: bool, then: str
) -> None:
    server, held, load = house.held_later()

    async def main() -> None:
        async with AsyncPlanner(server.endpoints[0], Options(session="default")) as planner:

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


def test_a_deadline_is_less_with_every_try() -> None:
    began = time.monotonic() - 3
    attempts = Attempts(Options(), PlanRequest(prompt="x", deadline_ms=60_000), began=began)
    assert msgspec.msgpack.decode(attempts.send().body)["deadline_ms"] <= 57_000
    late = Attempts(Options(), PlanRequest(prompt="x", deadline_ms=2999), began=began)
    with pytest.raises(PlanError) as caught:
        late.send()
    assert caught.value.code == "deadline"


def test_a_connection_is_waited_for_until_the_deadline_and_an_answer_longer() -> None:
    began, options = time.monotonic(), Options(timeout_s=60.0, plan_timeout_s=500.0)
    attempts = Attempts(options, PlanRequest(prompt="x", deadline_ms=5000), began=began)
    assert (attempts.connect_by, attempts.until) == (began + 5, began + 5 + GRACE_S)
    for request, limit in (
        (PlanRequest(prompt="x"), 500),
        (messages.PrefixPut(prefix_id="a", system="x"), 500),
        (messages.Simple(op="ping"), 60),
    ):
        attempts = Attempts(options, request, began=began)
        assert attempts.until == began + limit
        assert attempts.connect_by <= time.monotonic() + 60


@pytest.mark.parametrize(("codec", "sent"), [(MSGPACK, 1), (JSON, 4 / 3)])
def test_images_are_not_counted_as_the_rest_of_a_request(codec: Codec, sent: float) -> None:
    options, most = Options(codec=codec, max_message=1000), int(IMAGES_BYTES / sent) - 9

    def ask(size: int, prompt: str = "") -> messages.PlanRequest:
        images = [messages.ImageInput(id="a", format="png", data=bytes(part)) for part in (9, size)]
        return messages.PlanRequest(prompt=prompt, images=tuple(images))

    encode(ask(most - 9), options)
    for wrong, what in (
        (ask(most + 9), "the images of a request"),
        (ask(most - 9, "x" * 1000), "a request without its images, Options.max_message,"),
    ):
        with pytest.raises(PlanError, match=f"^{what} must be") as caught:
            encode(wrong, options)
        assert caught.value.code == "too_large"


@pytest.mark.parametrize("op", ["drain", "shutdown"])
def test_what_ends_a_server_is_not_sent_to_the_next_one(op: str) -> None:
    lost = PlanError("unreachable", "the connection was lost", retryable=True)
    with pytest.raises(PlanError):
        Attempts(Options(), messages.Simple(op=op)).retry_delay(lost)
    assert Attempts(Options(), messages.Simple(op="health")).retry_delay(lost) > 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("timeout_s", "5"), ("timeout_s", -1.0), ("timeout_s", math.nan), ("plan_timeout_s", True),
        ("plan_timeout_s", None), ("retries", 1.5), ("retries", -1), ("session", 7),
        ("session", ""), ("session", "s" * 65), ("token", b"secret"), ("keys", Path("keys")),
        ("codec", "json"), ("max_message", 1e6), ("max_message", 0),
    ],
)  # fmt: skip
def test_an_option_of_a_wrong_type_or_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        Options(**{name: value})
    assert f"Options.{name} must be " in str(caught.value)
    assert "secret" not in str(caught.value)


def test_options_that_ask_for_nothing_are_accepted() -> None:
    Options(timeout_s=0, plan_timeout_s=math.inf, retries=0, session=None, token=None, keys="")
