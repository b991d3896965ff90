"""Whatever is sent, a well-behaved client is served. `soak.py` does the same for a million."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import zmq

COUNT = 6000
SEED = 20261121


@pytest.fixture
def hostile(request: pytest.FixtureRequest) -> Any:
    """The module beside this one."""
    import importlib.util
    from pathlib import Path

    spec = importlib.util.spec_from_file_location("hostile", Path(__file__).parent / "hostile.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_hostile_frames_disturb_nobody_else(house: Any, hostile: Any) -> None:
    server = house.mock(max_message=100_000)
    port = int(server.endpoints[0].rpartition(":")[2])
    done = threading.Event()

    def attack() -> None:
        rng = random.Random(SEED)
        messages = hostile.frames(rng)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        sockets = [context.socket(zmq.DEALER) for _ in range(3)]
        for socket in sockets:
            socket.linger = 0
            socket.sndtimeo = 1000
            socket.connect(server.endpoints[0])
        for i in range(COUNT):
            try:
                rng.choice(sockets).send_multipart(next(messages))
            except zmq.Again:
                pass  # it was cut off for a frame beyond the limit, and connects again
            if i % 100 == 0:
                hostile.misbehave(port, rng)
                while any(socket.poll(0) and socket.recv_multipart() for socket in sockets):
                    pass
        for socket in sockets:
            socket.close()
        context.term()
        done.set()

    thread = threading.Thread(target=attack)
    thread.start()
    peer = house.peer(server)
    served = 0
    while not done.is_set() or served < 5:
        reply = peer.ask(op="plan", id=f"{served}", prompt="x", session="good", priority=9)
        served += reply["type"] == "result"
        # The queue is everybody's: a full one is an answer, too.
        assert reply["type"] == "result" or reply["code"] == "busy", reply
        assert peer.ask(op="ping", id="p")["status"] == "ok"
    thread.join(60)
    assert peer.ask(op="health", id="h")["ready"] is True
