"""One set of tests for every planner: in this process, and behind a socket by either client. Then
tests of the clients alone.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import zmq

from thor_dflash.config.serving import ServeConfig
from thor_dflash.core.errors import ConfigError
from thor_dflash.serving.client import (
    AsyncPlanner,
    Chunk,
    Options,
    PlanError,
    PlanRequest,
    RemotePlanner,
    Result,
)
from thor_dflash.serving.planner.mock_backend import PLAN, MockBackend
from thor_dflash.serving.planner.planner import LocalPlanner, Planner
from thor_dflash.serving.transport import access

CYCLE_S = 0.004
"""Time of a cycle: so long that a plan outlasts a deadline of 50 ms, which even a busy machine does
not miss before the plan begins."""


@dataclass
class AsyncBehindSync:
    """The asyncio client with the methods of the other planners, for the same tests."""

    endpoint: str

    def _run(self, work: Callable[[AsyncPlanner], Coroutine[Any, Any, Any]]) -> Any:
        async def main() -> Any:
            async with AsyncPlanner(self.endpoint, Options(retries=0)) as planner:
                await planner.simple("ping")
                return await work(planner)

        return asyncio.run(main())

    def plan(self, ask: PlanRequest) -> Result:
        result: Result = self._run(lambda planner: planner.plan(ask))
        return result

    def stream(self, ask: PlanRequest) -> Any:
        async def work(planner: AsyncPlanner) -> list[Any]:
            return [event async for event in planner.stream(ask)]

        yield from self._run(work)

    def close(self) -> None:
        pass


@pytest.fixture(params=["local", "remote", "asyncio"])
def planner(request: pytest.FixtureRequest, house: Any) -> Any:
    with ExitStack() as stack:
        if request.param == "local":
            found: Planner = LocalPlanner(MockBackend(ServeConfig(), CYCLE_S))
        else:
            endpoint = house.mock(CYCLE_S).endpoints[0]
            # Connect first, so that connecting takes nothing from a short deadline.
            if request.param == "remote":
                found = RemotePlanner(endpoint, Options(retries=0))
                found.ping()
            else:
                found = AsyncBehindSync(endpoint)
        stack.callback(found.close)
        yield found


def test_a_plan(planner: Planner) -> None:
    result = planner.plan(PlanRequest(prompt="Bring the cup.", generation=3, metadata={"a": [1]}))
    assert (result.status, result.finish_reason) == ("ok", "stop")
    assert result.plan == msgspec.json.decode(PLAN)
    assert (result.generation, result.metadata) == (3, {"a": [1]})
    assert result.usage.output_tokens == len(PLAN.split(" "))


def test_a_stream_says_what_the_result_says(planner: Planner) -> None:
    *chunks, last = planner.stream(
        PlanRequest(prompt="x", stream="all", parts=("plan", "text", "thinking", "tokens"))
    )
    assert isinstance(last, Result)
    assert all(isinstance(chunk, Chunk) for chunk in chunks)
    assert [event.seq for event in (*chunks, last)] == list(range(len(chunks) + 1))
    steps = [chunk.step for chunk in chunks if chunk.kind == "step"]
    assert steps == last.plan["steps"]
    text = "".join(chunk.text or "" for chunk in chunks if chunk.kind == "text")
    assert text.rstrip() == last.text
    whole = planner.plan(PlanRequest(prompt="x", parts=("plan", "text", "thinking", "tokens")))
    assert (whole.text, whole.thinking, whole.tokens) == (last.text, last.thinking, last.tokens)


@pytest.mark.parametrize(
    ("ask", "code", "field"),
    [
        (PlanRequest(), "bad_request", "prompt"),
        (PlanRequest(prompt="x", json_schema={"type": 7}), "schema_invalid", "json_schema"),
        (PlanRequest(prompt="x", deadline_ms=-5), "bad_request", "deadline_ms"),
        # Too short for the prompt, but not over before a busy machine looks at the request.
        (PlanRequest(prompt="x " * 4000, deadline_ms=200), "deadline_infeasible", "deadline_ms"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals(planner: Planner, ask: PlanRequest, code: str, field: str) -> None:
    for answer in (planner.plan, lambda ask: list(planner.stream(ask))):
        with pytest.raises(PlanError) as caught:
            answer(ask)
        assert (caught.value.code, caught.value.field) == (code, field)
        assert (caught.value.min_ms is not None) == (code == "deadline_infeasible")
    assert planner.plan(PlanRequest(prompt="x")).status == "ok", "and goes on"


def test_a_deadline_gives_the_part_that_is_whole(planner: Planner) -> None:
    slow = PlanRequest(prompt="x", thinking_budget=1000, deadline_ms=50, on_deadline="partial")
    result = planner.plan(slow)
    assert (result.status, result.finish_reason) == ("partial", "deadline")
    assert result.plan is None or result.plan["steps"]


def test_a_limit_of_tokens_gives_the_part_that_is_whole(planner: Planner) -> None:
    result = planner.plan(PlanRequest(prompt="x", max_tokens=20))
    assert (result.status, result.finish_reason) == ("partial", "length")
    assert len(result.plan["steps"]) == 1


# --- the clients alone


def test_a_late_answer_is_never_the_next_ones(house: Any) -> None:
    """The client gives up on its first request and sends a second one. Only then does the server
    answer the first, twice, and after it the second.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    port = router.bind_to_random_port("tcp://127.0.0.1")
    late: list[list[bytes]] = []

    def answer(frames: list[bytes], text: str) -> None:
        id = msgspec.msgpack.decode(frames[-1])["id"]
        reply = {"v": 1, "type": "result", "id": id, "finish_reason": "stop", "text": text}
        router.send_multipart([*frames[:-1], msgspec.msgpack.encode(reply)])

    def serve() -> None:
        while len(late) < 2:
            frames = router.recv_multipart()
            if msgspec.msgpack.decode(frames[-1])["op"] == "plan":  # and not the first's cancel
                late.append(frames)
        answer(late[0], "stale")
        answer(late[0], "stale")
        answer(late[1], "fresh")

    thread = threading.Thread(target=serve)
    thread.start()
    options = Options(plan_timeout_s=0.3, retries=0)
    with RemotePlanner(f"tcp://127.0.0.1:{port}", options) as planner:
        with pytest.raises(PlanError) as caught:
            planner.plan(PlanRequest(prompt="first"))
        assert caught.value.code == "deadline"
        assert planner.plan(PlanRequest(prompt="second")).text == "fresh"
    thread.join(20)
    assert msgspec.msgpack.decode(late[0][-1])["id"] != msgspec.msgpack.decode(late[1][-1])["id"]
    router.close()
    context.term()


def test_a_client_waits_for_a_server_that_comes_later_and_comes_back(
    house: Any, tmp_path: Any
) -> None:
    endpoint = f"ipc://{tmp_path}/plan"
    with RemotePlanner(endpoint, Options(timeout_s=20.0)) as planner:
        answers: list[Result] = []
        thread = threading.Thread(
            target=lambda: answers.append(planner.plan(PlanRequest(prompt="x")))
        )
        thread.start()
        time.sleep(0.05)
        first = house.mock(bind=(endpoint,))
        thread.join(20)
        assert answers[0].status == "ok"
        first.stop()
        wait_until_free(endpoint)
        house.mock(bind=(endpoint,))
        assert planner.plan(PlanRequest(prompt="x")).status == "ok"


def wait_until_free(endpoint: str) -> None:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            access.check_free(endpoint)
        except ConfigError:
            time.sleep(0.002)
        else:
            return


def test_busy_is_tried_again_and_a_refusal_is_not(house: Any) -> None:
    server, held = house.held(max_queue=1)
    others = [house.peer(server) for _ in range(2)]
    for i, peer in enumerate(others):
        peer.send(op="plan", id="a", session=f"{i}", prompt="x")
        if not i:
            assert held.waiting.wait(20)
    with RemotePlanner(server.endpoints[0], Options(retries=0)) as planner:
        while planner.health()["waiting"] < 1:
            time.sleep(0.002)
        with pytest.raises(PlanError) as caught:
            planner.plan(PlanRequest(prompt="x"))
        assert caught.value.code == "busy"
    with RemotePlanner(server.endpoints[0], Options(retries=100)) as planner:
        threading.Timer(0.1, held.let).start()
        assert planner.plan(PlanRequest(prompt="x")).status == "ok"
        before = planner.stats()["requests"]["plan"]
        with pytest.raises(PlanError, match="prompt"):
            planner.plan(PlanRequest())
        assert planner.stats()["requests"]["plan"] == before + 1


def test_a_server_that_warms_up_is_waited_for(house: Any) -> None:
    warm = threading.Event()

    class Slow(MockBackend):
        def warm(self) -> None:
            assert warm.wait(20)

    config = ServeConfig(bind=("tcp://127.0.0.1:*",))
    server = house.load(lambda: Slow(config), config)
    with RemotePlanner(server.endpoints[0], Options(retries=1)) as planner:
        threading.Timer(1.2, warm.set).start()
        assert planner.plan(PlanRequest(prompt="x")).status == "ok"
        assert planner.stats()["refused"]["not_ready"] > 1
    warm.clear()


def test_closing_a_stream_cancels_it(house: Any) -> None:
    server, held = house.held()
    with RemotePlanner(server.endpoints[0]) as planner:
        held.let(2)
        stream = planner.stream(PlanRequest(prompt="x", stream="all"))
        next(stream)
        assert held.waiting.wait(20)
        stream.close()  # type: ignore[attr-defined]
        while planner.stats()["requests"].get("cancel", 0) < 1:
            time.sleep(0.002)
        held.let()
        while not held.ended:
            time.sleep(0.002)
        assert held.ended == ["cancelled"]
