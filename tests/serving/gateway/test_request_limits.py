"""The gateway's handlers by themselves: the limits of a request, and that no plan outlives it."""

from __future__ import annotations

import urllib.request
from typing import Any

import msgspec
import pytest
from support.http_gateway import CHAT, JSON, gateway
from support.waiting import PATIENCE_S


@pytest.mark.parametrize("lost", [3])
def test_a_stream_of_which_pieces_were_dropped_ends_with_an_error(house: Any, lost: int) -> None:
    body = msgspec.json.encode({"messages": CHAT, "stream": True})
    with gateway(house.skipping(lost).endpoints[0]) as address:
        asked = urllib.request.Request(f"{address}/v1/chat/completions", body, JSON)
        with urllib.request.urlopen(asked, timeout=PATIENCE_S) as reply:
            found = [msgspec.json.decode(line[6:]) for line in reply.read().split(b"\n\n") if line]
    assert len(found) == 1 + lost + 1, "the role, what came before the gap, and why it ends"
    assert found[-1]["error"]["message"].endswith("pieces of the stream (got 1 less)")
    assert found[-1]["error"]["code"] == "cancelled"
