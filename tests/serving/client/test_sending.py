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

from thor_dflash.config.serving import ServeConfig
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
from thor_dflash.serving.planner.mock_backend import MockBackend
from thor_dflash.serving.planner.planner import LocalPlanner
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


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:65536",
        "tcp://127.0.0.1:81107",
        "tcp://127.0.0.1:15571x",
        "tcp://127.0.0.1:15571 ",
        "tcp://127.0.0.1:*",
        "tcp://127.0.0.1",
        "inproc://x",
        "ws://127.0.0.1:15571",
    ],
)
@every_client
def test_an_endpoint_that_libzmq_would_take_for_another_is_refused(
    form: str, endpoint: str
) -> None:
    """It takes ports modulo 65536 and ignores letters after them."""
    rule = re.escape(f"endpoint must be tcp://host:port or ipc://path (got {endpoint})")
    with pytest.raises(ConfigError, match=f"^{rule}$"):
        plan(form, endpoint, Options(retries=0, timeout_s=0.1), PlanRequest(prompt="x"))


@pytest.mark.parametrize("place", ["tcp://127.0.0.1:1", "tcp://[::1]:65535", "ipc:///nowhere/plan"])
def test_every_other_endpoint_is_taken(place: str) -> None:
    connection.check(place, Options(), "--server")


@pytest.mark.parametrize(
    ("ask", "field"),
    [
        (PlanRequest(prompt="\udcff"), "prompt"),
        (PlanRequest(prompt="x", session="arm\udcff"), "session"),
        (PlanRequest(prompt="x", prefix_id="\ud800"), "prefix_id"),
        (PlanRequest(messages=(Message(role="user", content="\udcff"),)), "messages"),
        (PlanRequest(prompt="x", json_schema={"enum": ["\udcff"]}), "json_schema"),
        (PlanRequest(prompt="x", metadata={"\udcff": 1}), "metadata"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("codec", [JSON, MSGPACK], ids=lambda codec: codec.name)
@every_client
def test_what_is_not_utf8_is_not_sent(
    form: str, codec: Codec, ask: PlanRequest, field: str
) -> None:
    """Python decodes bytes of a command line that are not UTF-8 as lone surrogates."""
    with pytest.raises(PlanError, match=f"{field} must be UTF-8 .got: surrogates") as caught:
        plan(form, "ipc:///nowhere/plan", Options(codec=codec), ask)
    assert (caught.value.code, caught.value.field) == ("bad_request", field)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"deadline_ms": "1"}, 'deadline_ms must be an integer or null (got "1")'),
        ({"deadline_ms": [1]}, "deadline_ms must be an integer or null (got [1])"),
        ({"deadline_ms": True}, "deadline_ms must be an integer or null (got true)"),
        ({"deadline_ms": 1.5}, "deadline_ms must be an integer or null (got 1.5)"),
        ({"deadline_ms": 0}, "deadline_ms must be an integer >= 1 (got 0)"),
        ({"session": ["arm"]}, 'session must be a string or null (got ["arm"])'),
        ({"id": 7}, "id must be left out: the client gives each try its own (got 7)"),
        ({"metadata": {"a": 1j}}, "metadata must be plain JSON values (got: Encoding obj"),
        ({"parts": 1j}, "return must be plain JSON values (got: Encoding objects of type"),
    ],
    ids=str,
)
@every_client
def test_a_value_of_a_wrong_type_is_refused_as_by_a_server(
    form: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=f"^{re.escape(message)}") as caught:
        plan(form, "ipc:///nowhere/plan", Options(), PlanRequest(prompt="x", **fields))
    assert (caught.value.code, caught.value.field) == ("bad_request", message.split()[0])


def test_a_planner_of_the_same_process_refuses_a_deadline_of_a_wrong_type() -> None:
    wrong: Any = "1"
    with (
        LocalPlanner(MockBackend(ServeConfig())) as planner,
        pytest.raises(PlanError, match=r'^deadline_ms must be an integer or null \(got "1"\)$'),
    ):
        planner.plan(PlanRequest(prompt="x", deadline_ms=wrong))


@pytest.mark.parametrize("name", ["timeout_s", "plan_timeout_s", "retries", "max_message"])
@pytest.mark.parametrize("value", [-1, "x", None, True, float("nan")], ids=str)
def test_an_option_that_is_no_number_or_too_small_is_refused(name: str, value: Any) -> None:
    rule = "a number of seconds > 0" if name.endswith("_s") else "an integer >= [01]"
    with pytest.raises(ConfigError, match=rf"^{name} must be {rule} \(got {value!r}\)$"):
        Options(**{name: value})


@every_client
def test_an_id_of_the_callers_own_is_not_replaced_in_silence(form: str) -> None:
    """Nobody could cancel the plan by it."""
    rule = r"^id must be left out: the client gives each try its own \(got mine\)$"
    with pytest.raises(PlanError, match=rule) as caught:
        plan(form, "ipc:///nowhere/plan", Options(), PlanRequest(prompt="x", id="mine"))
    assert (caught.value.code, caught.value.field) == ("bad_request", "id")


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
