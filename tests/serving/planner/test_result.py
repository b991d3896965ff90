"""The status and the validity of a plan by how it ended."""

from __future__ import annotations

import pytest

from thor_dflash.config.serving import ServeConfig
from thor_dflash.core.results import Timings, Usage
from thor_dflash.serving.planner.mock_backend import MockBackend
from thor_dflash.serving.planner.result import Decoded, result
from thor_dflash.serving.protocol import messages

SCHEMA: dict[str, object] = {"type": "object", "required": ["goal"]}
STEP = '{"goal": "tidy", "steps": [{"id": 1, "skill": "wait", "args": {}}, {"id"'
"""A plan that was stopped after its first whole step."""


def ended(
    finish: messages.Finish, text: str, schema: dict[str, object] = SCHEMA
) -> messages.Result:
    ask = messages.PlanRequest(prompt="go", json_schema=schema)
    prepared = MockBackend(ServeConfig()).prepare(ask, None)
    decoded = Decoded(
        finish=finish,
        text=text,
        thinking="",
        tokens=(),
        usage=Usage(),
        timings=Timings(),
        spec=None,
    )
    return result(prepared, decoded)


@pytest.mark.parametrize(
    ("finish", "text", "status", "valid"),
    [
        ("stop", '{"goal": "tidy"}', "ok", True),
        ("stop", '{"aim": "tidy"}', "error", False),
        ("length", '{"goal": "ti', "partial", False),
        ("deadline", STEP, "partial", True),
        ("thinking_exhausted", "", "partial", False),
        ("grammar_dead_end", '{"goal": "tidy"}', "error", True),
        ("error", '{"goal": "tidy"}', "error", True),
    ],
)
def test_a_status_follows_from_the_ending_and_the_schema(
    finish: messages.Finish, text: str, status: str, valid: bool
) -> None:
    got = ended(finish, text)
    assert (got.status, got.plan_valid) == (status, valid)


@pytest.mark.parametrize(
    ("rules", "asks", "valid"),
    [
        ({}, True, True),
        ({"required": ["needs_clarification"]}, True, True),
        ({"properties": {"goal": {}, "steps": {}}, "additionalProperties": False}, False, True),
        ({"required": ["speed"]}, True, False),
    ],
)
def test_a_plan_that_was_cut_short_says_that_it_asks_nothing_unless_it_must_not(
    rules: dict[str, object], asks: bool, valid: bool
) -> None:
    got = ended("deadline", STEP, {"type": "object", **rules})
    assert got.plan is not None
    assert ("needs_clarification" in got.plan, got.plan_valid) == (asks, valid)
    assert got.plan["steps"] == [{"id": 1, "skill": "wait", "args": {}}]
