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
from thor_dflash.serving.gateway import metrics
from thor_dflash.serving.gateway.openai_api import (
    STATUS,
    ChatRequest,
    StreamOptions,
    error,
    plan_request,
    read,
)
from thor_dflash.serving.server.stats import WINDOW

CHAT = [{"role": "user", "content": "Bring the cup."}]
DOCUMENT = (Path(__file__).parents[3] / "docs/guide/serving.md").read_text()
TEXT = {"type": "text", "text": "Bring it."}


def formatted(kind: str, **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": kind, **more}}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"stop": [5]}, "stop"),
        ({"temperature": 0.7}, "temperature"),
        ({"top_p": 0.5}, "top_p"),
        ({"thinking": "some"}, "thinking"),
        ({"tools": []}, "tools"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": False}}, "stream_options.x"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"reasoning_effort": "none", "thinking": "on"}, "reasoning_effort"),
        (
            {"messages": [{"role": "user", "content": [{**TEXT, "cache_control": {}}]}]},
            "messages[0].content[0].cache_control",
        ),
        (formatted("grammar"), "response_format.type"),
        (formatted("json_object"), "response_format"),
        (
            formatted("json_schema", json_schema={"schema": {}, "x": 1}),
            "response_format.json_schema.x",
        ),
        (formatted("text", json_schema={"schema": {}}), "response_format.json_schema"),
        ({"messages": [*CHAT, {"role": "function", "content": ""}]}, "messages[1].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": []}]},
            "messages[0].tool_calls",
        ),
        ({"messages": None}, "messages"),
        ({"messages": [{**CHAT[0], "content": None}]}, "messages[0].content"),
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
        *({name: None} for name in ChatRequest.__struct_fields__ if name != "messages"),
        *({name: None} for name in ("tools", "frequency_penalty", "logit_bias", "store")),
        {"messages": [{**CHAT[0], "tool_calls": None, "refusal": None, "name": None}]},
        {"response_format": {"type": "text", "json_schema": None}},
    ],
    ids=str,
)
def test_null_is_as_if_left_out(fields: dict[str, Any]) -> None:
    bare = {"messages": CHAT}
    asks = [plan_request(read(msgspec.json.encode(body))) for body in (bare, {**bare, **fields})]
    assert asks[0] == asks[1]


def test_null_is_kept_where_it_says_something() -> None:
    schema = {"properties": {"a": {"const": None}}, "default": None}
    format = {"type": "json_schema", "json_schema": {"schema": schema}}
    options = {"include_usage": None}
    body = {"messages": CHAT, "response_format": format, "stream": True, "stream_options": options}
    asked = read(msgspec.json.encode(body))
    assert plan_request(asked).json_schema == schema
    assert asked.stream_options == StreamOptions()


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


def test_the_latencies_are_what_the_document_says() -> None:
    named = set(re.findall(r"`([a-z0-9_]+_ms)`", DOCUMENT.partition("Latencies are")[2]))
    assert named - {"deadline_ms"} == {name for name, _ in metrics.LATENCIES}
    assert f"of the last {WINDOW} plans" in DOCUMENT


def test_every_number_of_a_server_is_under_a_name_of_its_own() -> None:
    stats: dict[str, Any] = {
        "spec": {"cycles": 1, "drafted": 2, "accepted": 3, "forced": 4,
                 "accepted_per_position": []},
        "tokens": {"prompt": 5, "cached": 6, "output": 7, "thinking": 8},
        "finished": {"stop": 9}, "refused": {"busy": 10}, "running": 11, "waiting": 12,
        "percentiles": {"ttft_ms": {"p50": 13}, "ttfa_ms": {"p50": 14}, "e2e_ms": {"p50": 15},
                        "queue_ms": {"p50": 16}},
    }  # fmt: skip
    rows = metrics.render([("a", stats), ("b", None)]).decode().splitlines()
    pairs = [row.rsplit(" ", 1) for row in rows if row.startswith("thor_dflash:")]
    found = {name.removeprefix("thor_dflash:"): float(value) for name, value in pairs}
    quantile = 'quantile="0.50",server="a"'
    assert found == {
        'up{server="a"}': 1,
        'up{server="b"}': 0,
        'spec_decode_num_drafts_total{server="a"}': 1,
        'spec_decode_num_draft_tokens_total{server="a"}': 2,
        'spec_decode_num_accepted_tokens_total{server="a"}': 3,
        'spec_decode_num_forced_tokens_total{server="a"}': 4,
        'prompt_tokens_total{server="a"}': 5,
        'prompt_tokens_cached_total{server="a"}': 6,
        'generation_tokens_total{server="a"}': 7,
        'thinking_tokens_total{server="a"}': 8,
        'request_success_total{finished_reason="stop",server="a"}': 9,
        'request_refused_total{code="busy",server="a"}': 10,
        'num_requests_running{server="a"}': 11,
        'num_requests_waiting{server="a"}': 12,
        f"time_to_first_token_ms{{{quantile}}}": 13,
        f"time_to_first_answer_token_ms{{{quantile}}}": 14,
        f"e2e_request_latency_ms{{{quantile}}}": 15,
        f"request_queue_time_ms{{{quantile}}}": 16,
    }
