"""The queue of the decode thread: its order, and the share of each connection."""

from __future__ import annotations

import pytest

from thor_dflash.core.errors import PlanError
from thor_dflash.serving.protocol.codec import JSON
from thor_dflash.serving.server.decode_queue import AT_ONCE, MAX_INLINE, POOL, DecodeQueue
from thor_dflash.serving.server.scheduler import Peer
from thor_dflash.serving.server.worker_messages import UndecodedRequest

MOST = 4 * AT_ONCE
LONG = bytes(AT_ONCE)


class Fixture:
    def __init__(self, largest: int = MOST) -> None:
        self.started: list[UndecodedRequest] = []
        self.queue = DecodeQueue(self.started.append, MOST, largest)

    def peer(self, name: bytes) -> Peer:
        return Peer((name, b""), JSON)

    def add(self, name: bytes, body: bytes = LONG) -> None:
        self.queue.add(self.peer(name), body)

    def fill(self, name: bytes) -> int:
        """Add bodies until there are too many; the bytes that were taken."""
        taken = 0
        while True:
            try:
                self.add(name, bytes(MOST))
                taken += MOST
            except PlanError as e:
                busy = e
                break
        assert (busy.code, busy.retryable) == ("busy", True)
        return taken

    def finish(self) -> list[bytes]:
        """Decode everything; whose bodies they were, in order."""
        order = list[bytes]()
        while self.started:
            order.append(self.started[0].peer.routing)
            self.queue.done(self.started.pop(0))
        assert self.queue.idle
        return order


@pytest.fixture
def it() -> Fixture:
    return Fixture()


def test_only_long_bodies_and_what_follows_them_must_wait(it: Fixture) -> None:
    short = bytes(MAX_INLINE)
    assert it.queue.must_wait(it.peer(b"a"), short + b"x")
    assert not it.queue.must_wait(it.peer(b"a"), short)
    it.add(b"a")
    assert it.queue.must_wait(it.peer(b"a"), short)
    assert not it.queue.must_wait(it.peer(b"b"), short)
    it.finish()
    assert not it.queue.must_wait(it.peer(b"a"), short)


def test_connections_take_turns_and_each_keeps_its_order(it: Fixture) -> None:
    for name in (b"a", b"a", b"a", b"b", b"c", b"c"):
        it.add(name)
    assert it.finish() == [b"a", b"a", b"b", b"c", b"a", b"c"]


def test_each_connection_may_have_one_body_and_a_share(it: Fixture) -> None:
    held = [it.fill(b"%d" % i) for i in range(50)]
    assert held[0] == POOL * MOST
    assert held == sorted(held, reverse=True)
    assert set(held[POOL:]) == {MOST}
    it.finish()
    assert it.fill(b"0") == POOL * MOST


def test_the_largest_bodies_share_what_may_wait() -> None:
    largest = 16 * MOST
    it, body = Fixture(largest), bytes(largest)
    for name in (b"0", b"1", b"2", b"3"):
        it.add(name, body)
    with pytest.raises(PlanError) as caught:
        it.add(b"4", body)
    assert caught.value.code == "busy"
    it.add(b"4", bytes(MOST))
    it.finish()
    for _ in range(POOL):
        it.add(b"4", body)


def test_bodies_of_a_closed_connection_are_not_decoded(it: Fixture) -> None:
    for name in (b"a", b"b", b"b", b"c"):
        it.add(name)
    it.queue.abandon(lambda peer: peer.routing in (b"a", b"b"))
    assert not it.queue.done(it.started.pop())
    assert [one.peer.routing for one in it.started] == [b"c"]
    assert not it.queue.idle
    it.queue.abandon()
    assert it.queue.idle
    assert not it.queue.done(it.started.pop())
    assert not it.queue._bytes
