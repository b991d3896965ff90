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

from thor_dflash.core.errors import ConfigError
from thor_dflash.serving.client import (
    AsyncPlanner,
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


@pytest.mark.parametrize("end", ["1:65536", "1:15571x"])
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
        ({"metadata": {"a": 1j}}, "metadata"),
        ({"deadline_ms": 0}, "deadline_ms"),
        ({"session": ["arm"]}, "session"),
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
