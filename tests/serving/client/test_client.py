"""The clients by themselves: how they close, try again and recognise their own answers."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from support.waiting import until

from thor_dflash.core.errors import PlanError
from thor_dflash.serving.client import (
    AsyncPlanner,
    Options,
    PlanRequest,
    RemotePlanner,
    async_client,
    client,
    retry,
)
from thor_dflash.serving.client.retry import Attempts
from thor_dflash.serving.protocol import messages

NOWHERE = "tcp://127.0.0.1:9"
STREAM = PlanRequest(prompt="x", stream="all")


def ends(work: Callable[[], object]) -> None:
    """Run `work`, which might never return; the test fails if it does not."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as e:
            errors.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "it hangs"
    if errors:
        raise errors[0]


# --- closing


def test_closing_a_client_ends_its_open_streams(house: Any) -> None:
    server, held = house.held()
    held.let(2)
    streams: list[Any] = []

    def leave() -> None:
        with RemotePlanner(server.endpoints[0]) as planner:
            streams.extend(planner.stream(STREAM) for _ in range(2))
            next(streams[0])
            assert held.waiting.wait(20)

    ends(leave)
    for stream in streams:  # the first had begun, the second had not
        with pytest.raises(PlanError, match=r"must answer \(got none: the client was closed\)"):
            next(stream)
    scheduler = server._handlers.scheduler
    until(lambda: scheduler.running is None or scheduler.running.stop)
    held.let()
    until(lambda: held.ended)
    assert held.ended == ["cancelled"]


def test_closing_an_asyncio_client_ends_all_that_wait(
    house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for an answer, for the rest of a stream, for a connection, and for the next try."""
    monkeypatch.setattr(Attempts, "retry_delay", lambda *_: 3600.0)
    server, held = house.held(max_queue=1)
    held.let(2)

    async def main() -> None:
        planner = AsyncPlanner(server.endpoints[0], Options(retries=10**9, plan_timeout_s=5.0))
        lonely = AsyncPlanner(NOWHERE, Options(timeout_s=5.0))
        stream = planner.stream(STREAM)
        await anext(stream)
        asks = [PlanRequest(prompt="x", session=f"{i}") for i in range(2)]
        waiting = [asyncio.create_task(planner.plan(asks[0]))]
        while (await planner.simple("health"))["waiting"] < 1:
            await asyncio.sleep(0.002)
        waiting += [asyncio.create_task(planner.plan(asks[1]))]
        while (await planner.simple("stats"))["refused"].get("busy", 0) < 1:
            await asyncio.sleep(0.002)
        waiting += [asyncio.create_task(lonely.simple("ping"))]
        await asyncio.sleep(0.01)
        for one in (planner, lonely):
            await one.close()
            await one.close()
        for work in (*waiting, rest(stream), planner.plan(asks[0]), planner.simple("ping")):
            with pytest.raises(PlanError, match="the client was closed") as caught:
                await asyncio.wait_for(work, 20)
            assert caught.value.code == "unreachable"

    async def rest(stream: Any) -> None:
        async for _ in stream:
            pass

    asyncio.run(main())


# --- asking


@pytest.mark.parametrize("kind", ["plan", "stream"])
def test_a_plan_that_is_waited_for_no_longer_is_cancelled(house: Any, kind: str) -> None:
    server, held = house.held()
    options = Options(plan_timeout_s=0.05, timeout_s=20.0)
    with RemotePlanner(server.endpoints[0], options) as planner:
        planner.stats()  # connected: the first connection of a process may take longer
        with pytest.raises(
            PlanError, match=r"within plan_timeout_s \(got nothing for 0.05 s\)"
        ) as e:
            planner.plan(STREAM) if kind == "plan" else list(planner.stream(STREAM))
        assert (e.value.code, e.value.retryable) == ("deadline", False)
        until(lambda: planner.stats()["requests"].get("cancel"))
        held.let()
        until(lambda: not planner.stats()["running"])
        assert planner.stats()["finished"] == {"cancelled": 1}
        assert planner.plan(PlanRequest(prompt="x", deadline_ms=20_000)).status == "ok"


@pytest.mark.parametrize("kind", [RemotePlanner, AsyncPlanner])
def test_a_stream_that_goes_on_may_take_as_long_as_it_likes(
    house: Any, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, held = house.held()
    ahead, options = 0.0, Options(plan_timeout_s=20.0)
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead, sleep=time.sleep)
    for module in (client, async_client, retry):
        monkeypatch.setattr(module, "time", clock)

    def take(event: messages.Event) -> messages.Event:
        nonlocal ahead
        ahead += 15.0
        held.let(1)
        return event

    async def last() -> Any:
        async with AsyncPlanner(server.endpoints[0], options) as planner:
            return [take(event) async for event in planner.stream(STREAM)][-1]

    held.let(1)
    if kind is AsyncPlanner:
        result = asyncio.run(last())
    else:
        with RemotePlanner(server.endpoints[0], options) as planner:
            result = [take(event) for event in planner.stream(STREAM)][-1]
    assert (result.finish_reason, ahead > 60) == ("stop", True)


@contextmanager
def answering(
    texts: dict[str, str], envelopes: list[list[bytes]] | None = None, *, delayed: bool = False
) -> Iterator[str]:
    """A server that answers one request with a result for each of `texts`, whose keys are ids of
    requests; "" stands for the id of the request itself. `delayed`: when the next request comes.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.linger, router.rcvtimeo = 0, 20_000
    port = router.bind_to_random_port("tcp://127.0.0.1")

    def serve() -> None:
        *envelope, body = router.recv_multipart()
        if delayed:
            router.recv_multipart()
        if envelopes is not None:
            envelopes.append(envelope)
        own = msgspec.msgpack.decode(body)["id"]
        for id, text in texts.items():
            reply = {"type": "result", "id": id or own, "finish_reason": "stop", "text": text}
            router.send_multipart([*envelope, msgspec.msgpack.encode(reply)])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{port}"
    finally:
        thread.join(20)
        router.close()
        context.term()


def test_an_answer_to_another_request_is_not_taken() -> None:
    """Not even if its envelope is right."""
    with (
        answering({"another": "wrong"}) as endpoint,
        RemotePlanner(endpoint, Options(retries=0)) as planner,
        pytest.raises(PlanError, match=r"the reply must be to .* \(got another\)"),
    ):
        planner.plan(PlanRequest(prompt="x"))


def test_a_late_answer_does_not_block_the_next_request() -> None:
    """The reply to the first request arrives while that to the second one is waited for, which
    does not come. The socket drops it, and the client must not block in reading.
    """
    with (
        answering({"": "late"}, delayed=True) as endpoint,
        RemotePlanner(endpoint, Options(timeout_s=0.1, retries=0)) as planner,
    ):
        for _ in range(2):
            with pytest.raises(PlanError, match="silent") as caught:
                ends(planner.ping)
            assert caught.value.code == "unreachable"


@pytest.mark.parametrize("kind", [RemotePlanner, AsyncPlanner])
def test_a_deadline_that_is_over_before_a_connection_is_named(kind: Any) -> None:
    """Something listens, and does not speak: nobody can know yet whether it is a server."""

    async def code(ms: int, timeout_s: float) -> str:
        with pytest.raises(PlanError) as caught:
            options = Options(timeout_s=timeout_s, retries=0)
            if kind is RemotePlanner:
                with RemotePlanner(endpoint, options) as planner:
                    planner.plan(PlanRequest(prompt="x", deadline_ms=ms))
            else:
                async with AsyncPlanner(endpoint, options) as remote:
                    await remote.plan(PlanRequest(prompt="x", deadline_ms=ms))
        return caught.value.code

    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        assert asyncio.run(code(20, 5.0)) == "deadline"
        assert asyncio.run(code(5000, 0.02)) == "unreachable"
