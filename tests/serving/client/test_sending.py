"""Both clients before a request has reached the server: what they refuse to send, and that a lost
connection then loses nothing.
"""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from typing import Any

import pytest
import zmq
from support.waiting import PATIENCE_S, until

from thor_dflash.core.errors import ConfigError
from thor_dflash.serving.client import (
    AsyncPlanner,
    Message,
    Options,
    PlanError,
    PlanRequest,
    RemotePlanner,
    Result,
    connection,
)
from thor_dflash.serving.protocol.codec import JSON, MSGPACK, Codec

every_client = pytest.mark.parametrize("form", ["remote", "asyncio"])


def plan(form: str, endpoint: str, options: Options, ask: PlanRequest) -> Result:
    async def main() -> Result:
        async with AsyncPlanner(endpoint, options) as planner:
            return await planner.plan(ask)

    if form == "asyncio":
        return asyncio.run(main())
    with RemotePlanner(endpoint, options) as planner:
        return planner.plan(ask)


@pytest.mark.parametrize("end", ["1:0", "1:65536", "1:15571x", "1:15571 ", "1:*", "1"])
@every_client
def test_an_endpoint_that_libzmq_would_take_for_another_is_refused(form: str, end: str) -> None:
    """It takes ports modulo 65536 and ignores other characters after them."""
    endpoint = f"tcp://127.0.0.{end}"
    with pytest.raises(ConfigError, match=rf"^endpoint must be .* \(got {re.escape(endpoint)}\)$"):
        plan(form, endpoint, Options(retries=0, timeout_s=0.1), PlanRequest(prompt="x"))


@pytest.mark.parametrize("place", ["tcp://[::1]:65535", "ipc:///nowhere/plan"])
def test_every_other_endpoint_is_taken(place: str) -> None:
    connection.check(place, Options(), "--server")
    for wrong in ("inproc://x", "ws://127.0.0.1:15571"):
        with pytest.raises(ConfigError):
            connection.check(wrong, Options(), "--server")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        # Python decodes bytes of a command line that are not UTF-8 as lone surrogates.
        ({"prompt": "\udcff"}, "prompt"),
        ({"session": "arm\udcff"}, "session"),
        ({"prompt": None, "messages": (Message(role="user", content="\udcff"),)}, "messages"),
        ({"json_schema": {"enum": ["\udcff"]}}, "json_schema"),
        ({"metadata": {"\udcff": 1}}, "metadata"),
        ({"metadata": {"a": 1j}}, "metadata"),
        ({"parts": 1j}, "return"),
        ({"deadline_ms": "1"}, "deadline_ms"),
        ({"deadline_ms": True}, "deadline_ms"),
        ({"deadline_ms": 1.5}, "deadline_ms"),
        ({"deadline_ms": 0}, "deadline_ms"),
        ({"session": ["arm"]}, "session"),
        ({"id": 7}, "id"),
        ({"id": "mine"}, "id"),  # it would be replaced, and nobody could cancel the plan by it
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize(
    ("form", "codec"), [("remote", JSON), ("asyncio", MSGPACK)], ids=["remote", "asyncio"]
)
def test_what_no_server_takes_is_not_sent(
    form: str, codec: Codec, fields: dict[str, Any], field: str
) -> None:
    request = PlanRequest(**{"prompt": "x", **fields})
    with pytest.raises(PlanError) as caught:
        plan(form, "ipc:///nowhere/plan", Options(codec=codec), request)
    assert (caught.value.code, caught.value.field) == ("bad_request", field)


@pytest.mark.parametrize("name", ["timeout_s", "plan_timeout_s", "retries", "max_message"])
def test_an_option_that_is_no_number_or_too_small_is_refused(name: str) -> None:
    for value in (-1, "x", None, True, float("nan")):
        with pytest.raises(ConfigError, match=rf"^{name} must be .* \(got {value!r}\)$"):
            Options(**{name: value})  # type: ignore[arg-type]


@every_client
def test_a_connection_that_never_was_loses_no_request(form: str, house: Any) -> None:
    """A server that is about to end may close a connection before the handshake. Nothing was sent
    on it, so that the next server answers the request without a retry.
    """
    answers: list[Result] = []
    options = Options(retries=0, timeout_s=20.0)
    with socket.create_server(("127.0.0.1", 0)) as leaving:
        endpoint = f"tcp://127.0.0.1:{leaving.getsockname()[1]}"
        thread = threading.Thread(
            target=lambda: answers.append(plan(form, endpoint, options, PlanRequest(prompt="x")))
        )
        thread.start()
        leaving.accept()[0].close()
    house.mock(bind=(endpoint,))
    thread.join(20)
    assert [answer.status for answer in answers] == ["ok"]


def test_a_connection_lost_just_before_a_request_is_sent_is_not_waited_for(
    house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, refused = house.mock(), list[PlanError]()
    planner = RemotePlanner(server.endpoints[0], Options(retries=0))
    planner.ping()
    link = planner._control._socket

    class Poller(zmq.Poller):
        def poll(self, timeout: float | None = None) -> list[tuple[Any, int]]:
            """Ends the server after it has found that a request can be sent."""
            found = super().poll(timeout)
            if link in dict(found):
                server.stop()
                server.stop()
                until(lambda: not link.getsockopt(zmq.EVENTS) & zmq.POLLOUT)
            return found

    def ask() -> None:
        with pytest.raises(PlanError) as caught:
            planner.plan(PlanRequest(prompt="x", deadline_ms=500))
        refused.append(caught.value)
        planner.close()

    monkeypatch.setattr(zmq, "Poller", Poller)
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert [error.code for error in refused] == ["unreachable"]
