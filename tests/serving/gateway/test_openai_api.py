"""The gateway's requests and refusals in OpenAI's terms; its statuses and metrics are those of
docs/guide/serving.md.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from thor_dflash.core.errors import PlanError
from thor_dflash.serving.gateway.openai_api import (
    STATUS,
    error,
    plan_request,
    read,
)

CHAT = [{"role": "user", "content": "Bring the cup."}]
DOCUMENT = (Path(__file__).parents[3] / "docs/guide/serving.md").read_text()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"n": 2}, "n"),
        ({"temperature": 0.7}, "temperature"),
        ({"tools": []}, "tools"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"reasoning_effort": "none", "thinking": "on"}, "reasoning_effort"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": []}]},
            "messages[0].tool_calls",
        ),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    body = msgspec.json.encode({"messages": CHAT, **fields})
    with pytest.raises(PlanError) as caught:
        plan_request(read(body))
    assert (caught.value.code, caught.value.field) == ("bad_request", field)
    assert caught.value.message.startswith(field)


@pytest.mark.parametrize(
    "fields",
    [
        dict.fromkeys(("temperature", "session", "tools", "store")),
        {"messages": [{**CHAT[0], "tool_calls": None, "refusal": None, "name": None}]},
        {"response_format": {"type": "text", "json_schema": None}},
    ],
    ids=str,
)
def test_null_is_as_if_left_out(fields: dict[str, Any]) -> None:
    bare = {"messages": CHAT}
    asks = [plan_request(read(msgspec.json.encode(body))) for body in (bare, {**bare, **fields})]
    assert asks[0] == asks[1]


def test_what_is_taken_without_effect_has_none() -> None:
    found = DOCUMENT.partition("Taken, and without effect:")[2].partition(".\n")[0]
    plain = {"type": "json_schema", "json_schema": {"schema": {}}}
    more = {"type": "json_schema", "json_schema": {"schema": {}, "strict": False, "name": "a"}}
    named = [{**CHAT[0], "name": "Ann"}]
    for extra in ({"user": "u"}, {"seed": 5}, {"messages": named}, {"response_format": more}):
        bare = {"messages": CHAT, "response_format": plain}
        asks = [plan_request(read(msgspec.json.encode(body))) for body in (bare, {**bare, **extra})]
        assert asks[0] == asks[1]
        assert f"`{next(iter(extra))}" in found


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ("prompt", "messages"),
        ("messages", "messages"),
        ("json_schema", "response_format.json_schema.schema"),
        ("deadline_ms", "deadline_ms"),
    ],
)
def test_a_refusal_of_a_server_names_what_the_client_sent(field: str, param: str) -> None:
    refusal = PlanError("bad_request", f"{field} must be {field}", field=field)
    found = error(refusal, read(msgspec.json.encode({"messages": CHAT})))["error"]
    assert (found["param"], found["message"]) == (param, f"{param} must be {field}")


def test_the_statuses_are_what_the_document_says() -> None:
    text = DOCUMENT.partition("Errors are OpenAI's")[2].partition(". `Retry-After`")[0]
    found = {
        word: int(status)
        for status, words in re.findall(r"(\d{3})\s\(([^)]*)\)", text)
        for word in re.findall(r"`(\w+)`", words)
    }
    assert found == {code: status for code, status in STATUS.items() if status != 400}
