"""A server tells the clients behind a proxy apart, and knows each of them again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from support.waiting import until

CORRELATE = {"REQ_RELAXED": 1, "REQ_CORRELATE": 1}


@pytest.fixture
def proxied(house: Any) -> Iterator[tuple[Any, Any]]:
    """A held backend, and the endpoint of a proxy in front of its server."""
    server, held = house.held()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    front, back, control = (context.socket(kind) for kind in (zmq.ROUTER, zmq.DEALER, zmq.PAIR))
    port = front.bind_to_random_port("tcp://127.0.0.1")
    back.connect(server.endpoints[0])
    control.bind("inproc://control")
    end = context.socket(zmq.PAIR)
    end.connect("inproc://control")
    thread = threading.Thread(target=lambda: zmq.proxy_steerable(front, back, None, control))
    thread.start()
    yield held, SimpleNamespace(endpoints=(f"tcp://127.0.0.1:{port}",))
    end.send(b"TERMINATE")
    thread.join(20)
    context.destroy(0)


@pytest.mark.parametrize("options", [{}, CORRELATE], ids=["plain", "correlated"])
def test_clients_behind_a_proxy_are_distinguished(
    house: Any, proxied: tuple[Any, Any], options: dict[str, int]
) -> None:
    held, proxy = proxied
    one, two = (house.peer(proxy, zmq.REQ, **options) for _ in range(2))
    one.send(op="plan", id="a", prompt="x")
    assert held.waiting.wait(20)
    two.send(op="plan", id="a", prompt="x")
    watch = house.peer(proxy)
    until(lambda: watch.ask(op="health", id="h")["waiting"] == 1)
    held.let()
    assert [peer.receive()["type"] for peer in (one, two)] == ["result"] * 2


def test_a_client_behind_a_proxy_is_one_in_all_its_requests(
    house: Any, proxied: tuple[Any, Any]
) -> None:
    held, proxy = proxied
    peer = house.peer(proxy, zmq.REQ, **CORRELATE)
    peer.send(op="plan", id="a", prompt="x")
    assert held.waiting.wait(20)
    assert peer.ask(op="cancel", id="c", target="a")["cancelled"] is True
