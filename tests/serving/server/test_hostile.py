"""Whatever others send, a well-behaved client is served. `soak.py hostile` does this at length."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from support.hostile_peers import attack

SEED = 20261121


@pytest.mark.parametrize("count", [1000, pytest.param(2000, marks=pytest.mark.slow)])
def test_hostile_frames_disturb_nobody_else(house: Any, count: int) -> None:
    server = house.mock(max_message=100_000)
    thread = threading.Thread(
        target=lambda: attack(server.endpoints[0], count, SEED, lambda i: None)
    )
    thread.start()
    peer, served = house.peer(server), 0
    while thread.is_alive() or served < 5:
        reply = peer.ask(op="plan", id=f"{served}", prompt="x", session="good", priority=9)
        served += reply["type"] == "result"
        # The attackers share the queue, so that it may be full.
        assert reply["type"] == "result" or reply["code"] == "busy", reply
        assert peer.ask(op="ping", id="p")["status"] == "ok"
    assert peer.ask(op="health", id="h")["ready"] is True
    refused = peer.ask(op="stats", id="s")["refused"]
    assert refused["bad_request"] > count / 4
    assert refused.get("internal", 0) == 0
