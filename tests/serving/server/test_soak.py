"""A short form of the check `soak` in soak.py."""

from __future__ import annotations

from typing import Any

from support.constrained_model import package
from support.soak_clients import Soak

from thor_dflash.config.engine import EngineConfig
from thor_dflash.config.serving import ServeConfig
from thor_dflash.core.progress import Silent
from thor_dflash.runtime.session import open_session
from thor_dflash.serving.planner.session_backend import SessionBackend

COUNT = 25
ROUNDS = 5
"""Most times COUNT plans: when a plan is cancelled or displaced depends on the machine."""
OUTCOMES = {"preempted", "cancelled", "length"}


def test_every_plan_is_answered_once_and_as_if_it_were_alone(house: Any) -> None:
    config = ServeConfig()
    session = open_session(package(), EngineConfig(threads=1), Silent())
    server = house.serve(SessionBackend(session, config))
    soak = Soak(server.endpoints[0], seed=7)
    try:
        for done in range(ROUNDS):
            soak.run(COUNT * (done + 1))
            if set(soak.tally) >= OUTCOMES:
                break
    finally:
        soak.close()
    assert set(soak.tally) >= OUTCOMES, soak.tally
    peer = house.peer(server)
    health = peer.ask(op="health", id="h")
    assert (health["ready"], health["error"]) == (True, None)
