"""The gateway's handlers by themselves: the limits of a request, and that no plan outlives it."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest
from msgspec import structs
from starlette.requests import Request
from support.http_gateway import CHAT, JSON, gateway
from support.waiting import PATIENCE_S

from thor_dflash.config.serving import GatewayConfig
from thor_dflash.core.errors import PlanError
from thor_dflash.serving.gateway.app import BODY_BYTES, Gateway, RequestBody
from thor_dflash.serving.protocol import messages

RESULT = messages.Result(finish_reason="stop", text="{}", plan_valid=True)


def request(body: bytes) -> Request:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    headers = [(b"content-type", b"application/json; charset=utf-8")]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive)


class Fleet:
    """Stands in for the servers: answers each plan at once, and counts those that are not over."""

    def __init__(self) -> None:
        self.open = 0

    async def stream(self, ask: object, model: str = "") -> AsyncGenerator[Any]:
        self.open += 1
        try:
            chunks = (messages.Chunk(kind="text", text="{"),) if model else ()
            for seq, event in enumerate((*chunks, RESULT)):
                yield type("Member", (), {"model": "nano"}), structs.replace(event, seq=seq)
        finally:
            self.open -= 1


def test_a_body_may_be_as_large_as_a_server_takes() -> None:
    assert len(asyncio.run(RequestBody().read(request(b"x" * BODY_BYTES)))) == BODY_BYTES
    with pytest.raises(PlanError, match=f"the body must be <= {BODY_BYTES} bytes"):
        asyncio.run(RequestBody().read(request(b"x" * (BODY_BYTES + 1))))


def test_a_server_is_free_as_soon_as_its_answer_is_whole() -> None:
    async def asked() -> None:
        gateway, fleet = Gateway(GatewayConfig()), Fleet()
        gateway._pool = fleet  # type: ignore[assignment]
        events = fleet.stream(None)
        fleet.stream = lambda *_: events  # type: ignore[method-assign,assignment]
        reply = await gateway.chat(request(msgspec.json.encode({"messages": CHAT})))
        assert (reply.status_code, fleet.open) == (200, 0), reply.body

    asyncio.run(asked())


@pytest.mark.parametrize("lost", [0, 3, 30])
def test_a_stream_of_which_pieces_were_dropped_ends_with_an_error(house: Any, lost: int) -> None:
    body = msgspec.json.encode({"messages": CHAT, "stream": True})
    with gateway(house.skipping(lost).endpoints[0]) as address:
        asked = urllib.request.Request(f"{address}/v1/chat/completions", body, JSON)
        with urllib.request.urlopen(asked, timeout=PATIENCE_S) as reply:
            found = [msgspec.json.decode(line[6:]) for line in reply.read().split(b"\n\n") if line]
    assert len(found) == 1 + lost + 1, "the role, what came before the gap, and why it ends"
    assert found[-1]["error"]["message"].endswith("pieces of the stream (got 1 less)")
    assert found[-1]["error"]["code"] == "cancelled"


@pytest.mark.parametrize(
    ("found", "status"),
    [([None, {"ready": True}], 200), ([{"ready": False}, None], 503), ([None], 503)],
)
def test_a_gateway_is_healthy_while_one_of_its_servers_takes_plans(
    found: list[Any], status: int
) -> None:
    class Told:
        async def everywhere(self, op: str) -> list[Any]:
            members = (type("Member", (), {"endpoint": f"{n}"}) for n in range(len(found)))
            return list(zip(members, found, strict=True))

    gateway = Gateway(GatewayConfig())
    gateway._pool = Told()  # type: ignore[assignment]
    reply = asyncio.run(gateway.health(request(b"")))
    assert (reply.status_code, msgspec.json.decode(reply.body)["ready"]) == (status, status == 200)
