"""Whether a plan thinks: where thinking is off, and where a pinned prefix leaves less to read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from thor_dflash.config.serving import ServeConfig
from thor_dflash.core.errors import PlanError
from thor_dflash.package.manifest import ModelCard
from thor_dflash.runtime.session import Session
from thor_dflash.serving.planner.backend import Backend
from thor_dflash.serving.planner.mock_backend import MockBackend
from thor_dflash.serving.planner.planner import LocalPlanner
from thor_dflash.serving.planner.session_backend import WORTH_THINKING, SessionBackend
from thor_dflash.serving.protocol.messages import Message, PlanRequest, PrefixPut

SYSTEM = "You plan for one arm. " + "It can pick, place and wait; nothing else at all. " * 6
CHAT = (Message(role="system", content=SYSTEM), Message(role="user", content="Pick the mug."))
ASK = PlanRequest(messages=CHAT, thinking="auto", max_tokens=20)


@pytest.mark.parametrize("name", [None, "arm"])
def test_what_a_pinned_prefix_saves_is_time_to_think(session: Session, name: str | None) -> None:
    backend = SessionBackend(session, ServeConfig(thinking_budget=500))
    put = backend.pin(PrefixPut(prefix_id="arm", system=SYSTEM), lambda: False)
    backend.rates.cycle_ms, backend.rates.step_ms = 1.0, {session.model.chunk: 100.0}
    count = len(backend.prepare(ASK, None).prompt)
    spaces = {
        backend.rates.thinking_tokens_left(i, count - put["held"], 20): i for i in range(1000)
    }
    enough = min(space for space in spaces if space >= WORTH_THINKING)
    less = max(space for space in spaces if space < WORTH_THINKING)
    ask = PlanRequest(messages=CHAT, thinking="auto", max_tokens=20, prefix_id=name)
    assert backend.rates.thinking_tokens_left(spaces[enough], count, 20) == 0, (
        "if all had to be read"
    )
    assert backend.prepare(ask, spaces[enough]).thinks
    assert not backend.prepare(ask, spaces[less]).thinks
    assert backend.drop("arm")
    assert not backend.prepare(ASK, spaces[enough]).thinks


EFFORT = PlanRequest(prompt="x", max_tokens=8, reasoning_effort="high")


def test_an_effort_is_a_budget_of_the_model_card(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = SessionBackend(session, ServeConfig(thinking="off", thinking_budget=9))

    def use(card: ModelCard) -> None:
        monkeypatch.setattr(session.model, "manifest", replace(session.manifest, card=card))

    use(ModelCard())
    with pytest.raises(PlanError) as caught:
        backend.prepare(EFFORT, None)
    assert (caught.value.code, caught.value.field) == ("bad_request", "reasoning_effort")
    use(ModelCard(high=30, x_high=40))
    result = LocalPlanner(backend).plan(EFFORT)
    assert result.thinking_budget == 30
    assert result.usage.thinking_tokens > 0
    for fields, budget in (
        ({"thinking_budget": 12}, 12),
        ({"thinking_budget": 50}, 30),
        ({"reasoning_effort": "xhigh"}, 40),
        ({"reasoning_effort": "none"}, 0),
        ({"reasoning_effort": None}, 0),
    ):
        assert backend.prepare(structs.replace(EFFORT, **fields), None).budget == budget, fields


@pytest.mark.parametrize("mock", [False, True], ids=["live", "mock"])
@pytest.mark.parametrize(
    ("default", "ask"),
    [
        ("off", PlanRequest(prompt="x", max_tokens=8)),
        ("off", PlanRequest(prompt="x", max_tokens=8, thinking_budget=50)),
        ("on", PlanRequest(prompt="x", max_tokens=8, thinking="off", thinking_budget=50)),
    ],
    ids=["server", "server-budget", "budget"],
)
def test_where_thinking_is_off_no_budget_brings_it_back(
    session: Session, mock: bool, default: Any, ask: PlanRequest
) -> None:
    config = ServeConfig(thinking=default)
    backend: Backend = MockBackend(config) if mock else SessionBackend(session, config)
    relaxed = structs.replace(ask, accept_mode="relaxed_thinking")
    result = LocalPlanner(backend).plan(relaxed)
    assert (result.usage.thinking_tokens, result.accept_mode) == (0, "exact")
    relaxed = structs.replace(relaxed, thinking="on", thinking_budget=50)
    assert LocalPlanner(backend).plan(relaxed).accept_mode == "relaxed_thinking"
