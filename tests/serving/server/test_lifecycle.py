"""Which state a server reports when more than one would fit, and when its engine counts as hung."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from thor_dflash.config.serving import ServeConfig
from thor_dflash.serving.planner.mock_backend import MockBackend
from thor_dflash.serving.server.heartbeat import Heartbeat
from thor_dflash.serving.server.lifecycle import DEGRADED, Lifecycle
from thor_dflash.serving.server.server import TICK_S, Server

WATCHDOG_S = 1000.0
LATE_S = DEGRADED * WATCHDOG_S


def stepping(since_s: float) -> Lifecycle:
    """The state of a server whose engine began a step `since_s` seconds ago."""
    heartbeat = Heartbeat(busy=True, at=time.monotonic() - since_s)
    return Lifecycle(WATCHDOG_S, MockBackend(ServeConfig()), heartbeat=heartbeat)


def test_a_draining_server_is_degraded_by_a_step_that_hangs() -> None:
    # A client that waits for the drained server to end must learn that it may never do so.
    lifecycle = stepping(LATE_S + 60)
    lifecycle.draining = True
    health = lifecycle.health(1, 0)
    assert (health["state"], health["level"], health["ready"]) == ("degraded", "ERROR", False)
    lifecycle.heartbeat.beat(busy=True)
    assert lifecycle.state(busy=True) == "draining"


@pytest.fixture
def watched() -> Iterator[tuple[Server, list[int]]]:
    """A server that does not run, of which a step began when it was last watched; and the statuses
    with which it ends.
    """
    statuses: list[int] = []
    config = ServeConfig(bind=("tcp://127.0.0.1:*",), watchdog_s=WATCHDOG_S)
    server = Server(lambda: MockBackend(config), config, log=lambda text: None, die=statuses.append)
    server._lifecycle.heartbeat.beat(busy=True)
    server._watch(server._lifecycle.heartbeat.at)
    yield server, statuses
    server._router.close()


def watch(server: Server, since_s: float, until_s: float, every_s: float = TICK_S) -> None:
    """Let the watchdog look every `every_s` seconds; the times count from the last sign of life."""
    at = server._lifecycle.heartbeat.at
    while since_s < until_s:
        since_s = min(until_s, since_s + every_s)
        server._watch(at + since_s)


def test_a_process_that_was_stopped_does_not_take_its_engine_for_hung(
    watched: tuple[Server, list[int]],
) -> None:
    server, statuses = watched
    watch(server, 0, 10)
    stopped = 10 + 2 * WATCHDOG_S
    watch(server, 10, stopped, every_s=stopped)
    assert not statuses
    watch(server, stopped, stopped + WATCHDOG_S - 11)
    assert not statuses, "but for 10 s, it has the time that it had"
    watch(server, stopped + WATCHDOG_S - 11, stopped + WATCHDOG_S - 9)
    assert set(statuses) == {70}, "and no more: a hung engine ends the process nevertheless"
