"""The status and the validity of a plan by how it ended."""

from __future__ import annotations

import pytest

from thor_dflash.serve_config import ServeConfig
from thor_dflash.serving import wire
from thor_dflash.serving.mock import MockBackend
from thor_dflash.serving.outcome import Decoded, result

SCHEMA = {"type": "object", "required": ["goal"]}
STEP = '{"goal": "tidy", "steps": [{"id": 1, "skill": "wait", "args": {}}, {"id"'
"""A plan that was stopped after its first whole step."""


def ended(finish: wire.Finish, text: str) -> wire.Result:
    ask = wire.Ask(prompt="go", json_schema=SCHEMA)
    prepared = MockBackend(ServeConfig()).prepare(ask, None)
    decoded = Decoded(
        finish=finish,
        text=text,
        thinking="",
        tokens=(),
        usage=wire.Usage(),
        timings=wire.Timings(),
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
    finish: wire.Finish, text: str, status: str, valid: bool
) -> None:
    got = ended(finish, text)
    assert (got.status, got.plan_valid) == (status, valid)
