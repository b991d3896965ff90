"""Which state a server reports when more than one would fit."""

from __future__ import annotations

import time

import pytest

from thor_dflash.errors import ModelFault
from thor_dflash.serve_config import ServeConfig
from thor_dflash.serving.life import DEGRADED, Life
from thor_dflash.serving.mock import MockBackend
from thor_dflash.serving.work import Pulse

WATCHDOG_S = 1000.0
LATE_S = DEGRADED * WATCHDOG_S


def stepping(since_s: float) -> Life:
    """The state of a server whose engine began a step `since_s` seconds ago."""
    pulse = Pulse(busy=True, at=time.monotonic() - since_s)
    return Life(WATCHDOG_S, MockBackend(ServeConfig()), pulse=pulse)


def test_a_step_that_hangs_is_told_of_a_server_that_drains_too() -> None:
    # A client that waits for the drained server to end must learn that it may never do so.
    life = stepping(LATE_S + 60)
    life.draining = True
    health = life.health(1, 0)
    assert (health["state"], health["level"], health["ready"]) == ("degraded", "ERROR", False)
    life.pulse.beat(busy=True)
    assert life.state(busy=True) == "draining"


@pytest.mark.parametrize(("since_s", "word"), [(LATE_S - 60, "busy"), (LATE_S + 60, "degraded")])
def test_a_step_is_late_by_its_share_of_the_watchdogs_time(since_s: float, word: str) -> None:
    assert stepping(since_s).state(busy=True) == word


def test_a_fault_is_told_before_everything_else() -> None:
    life = stepping(LATE_S + 60)
    life.draining, life.failed = True, ModelFault("what happened")
    assert life.state(busy=True) == "failed"
    assert "what happened" not in str(life.health(1, 0)), "that is for the log"
