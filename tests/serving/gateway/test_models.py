"""`/v1/models/NAME`: one model of the list, for clients that look whether it is there."""

from __future__ import annotations

import http.client
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
from msgspec import structs
from support.http_gateway import client, gateway
from support.waiting import until

from thor_dflash.config.serving import ServeConfig
from thor_dflash.serving.planner.mock_backend import MockBackend
from thor_dflash.serving.protocol.replies import ModelReply

NAME = "nvidia/Qwen 3.6?ü"


class Named(MockBackend):
    """A mock with the name of a model as hubs have them."""

    @property
    def about(self) -> ModelReply:
        return structs.replace(super().about, model=NAME)


def reply_of(address: str, path: str) -> tuple[int, Any, str | None]:
    """Status, body and `x-should-retry` of an answer."""
    asker = http.client.HTTPConnection(address.removeprefix("http://"), timeout=20)
    asker.request("GET", path)
    reply = asker.getresponse()
    body = msgspec.json.decode(reply.read())
    asker.close()
    return reply.status, body, reply.getheader("x-should-retry")


@pytest.mark.parametrize("path", [quote(NAME), quote(NAME, safe="")])
def test_a_model_is_described_as_in_the_list(house: Any, path: str) -> None:
    servers = (house.mock(), house.serve(Named(ServeConfig())))
    with gateway(*(server.endpoints[0] for server in servers)) as address:
        status, one, _ = reply_of(address, f"/v1/models/{path}")
        assert (status, one["id"], one["object"]) == (200, NAME, "model")
        until(lambda: len(reply_of(address, "/v1/models")[1]["data"]) == 2)
        listed = reply_of(address, "/v1/models")[1]["data"]
        assert one in listed
        assert reply_of(address, "/v1/models/")[1]["data"] == listed
        with client(address) as openai:
            assert [openai.models.retrieve(name).id for name in ("mock", NAME)] == ["mock", NAME]
