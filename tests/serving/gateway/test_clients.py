"""Bodies that clients send, recorded or written by their source, are taken as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from thor_dflash.config.serving import ServeConfig
from thor_dflash.serving.gateway.openai_api import Caller, plan_request, read
from thor_dflash.serving.planner.mock_backend import MockBackend
from thor_dflash.serving.protocol import validation

FILES = sorted((Path(__file__).parents[1] / "bodies").glob("*.json"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_clients_send_is_taken(file: Path) -> None:
    record = json.loads(file.read_text())
    caller = Caller(session=record["headers"].get("X-Session-ID", ""))
    backend = MockBackend(ServeConfig())
    for body in record["bodies"]:
        request = read(msgspec.json.encode(body))
        ask = plan_request(request, caller)
        validation.check(ask)
        assert ask.temperature == (body.get("temperature") or None)
        prepared = backend.prepare(ask, None)
        answered = body["messages"][-1]["role"] == "tool"
        assert bool(prepared.tools) == ("tools" in body and not answered)
        assert list(ask.tools or ()) == body.get("tools", [])
        assert ask.conversation == (caller.session or None)
        for turn, sent in zip(ask.messages or (), body["messages"], strict=True):
            for mine, theirs in zip(
                turn.tool_calls or (), sent.get("tool_calls") or (), strict=True
            ):
                assert loaded(mine) == loaded(theirs)


def loaded(call: dict[str, Any]) -> object:
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, dict) else json.loads(arguments)
