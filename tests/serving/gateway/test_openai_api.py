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
    NEUTRAL,
    Caller,
    plan_request,
    read,
)
from thor_dflash.serving.gateway.replies import STATUS, error
from thor_dflash.serving.protocol.errors import bad_request
from thor_dflash.serving.protocol.messages import PlanRequest

CHAT = [{"role": "user", "content": "Bring the cup."}]
DOCUMENT = (Path(__file__).parents[3] / "docs/guide/serving.md").read_text()
SYSTEMS = [{"role": "system", "content": text} for text in "ab"]


def called(arguments: object, name: str = "move", type: str = "function") -> dict[str, Any]:
    """An answer with a call, as clients send it back."""
    function = {"name": name, "arguments": arguments}
    call = {"id": "call_1", "type": type, "function": function}
    return {"role": "assistant", "tool_calls": [call]}


def asks(*, messages: Any = CHAT, **fields: Any) -> PlanRequest:
    """What a server is asked for by a body."""
    request = read(msgspec.json.encode({"messages": messages, **fields}))
    return plan_request(request)


def fault(**fields: Any) -> str | None:
    """The field at fault in a body that is refused; its message must begin with it."""
    with pytest.raises(PlanError) as caught:
        asks(**fields)
    assert caught.value.code == "bad_request"
    assert caught.value.message.startswith(caught.value.field or "no field")
    return caught.value.field


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1, "top_p": 0}, "top_p"),
        ({"temperature": 1, "min_p": 1.5}, "min_p"),
        ({"temperature": 1, "seed": -3}, "seed"),
        ({"temperature": 1, "presence_penalty": 1.5}, "presence_penalty"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"enable_thinking": 1}}, "chat_template_kwargs.enable_thinking"),
        (
            {"chat_template_kwargs": {"enable_thinking": True}, "thinking": "off"},
            "chat_template_kwargs.enable_thinking",
        ),
        ({"response_format": {"type": "json"}}, "response_format.type"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tools": [1]}, "tools[0]"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"max_token": 5}, "max_token"),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [*SYSTEMS, {**CHAT[0], "tool_call_id": "a"}]}, "messages[2].tool_call_id"),
        ({"messages": [*SYSTEMS, called("{")]}, "messages[2].tool_calls[0].function.arguments"),
        ({"messages": [called("[]")]}, "messages[0].tool_calls[0].function.arguments"),
        ({"messages": [called("{}", type="custom")]}, "messages[0].tool_calls[0].type"),
        ({"messages": [called("{}", name="")]}, "messages[0].tool_calls[0].function.name"),
        ({"messages": [{**called("{}"), "role": "user", "content": ""}]},
         "messages[0].tool_calls"),
        ({"messages": [{**CHAT[0], "function_call": {"name": "f"}}]}, "messages[0].function_call"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    assert fault(**fields) == field


def placed(name: str, value: object) -> dict[str, Any]:
    """A body with a value at the place that a name of NEUTRAL means."""
    if name.startswith("messages.content."):
        part = {"type": "text", "text": "Bring the cup.", name.rpartition(".")[2]: value}
        return {"messages": [{"role": "user", "content": [part]}]}
    if name.startswith("messages."):
        return {"messages": [{**CHAT[0], name.partition(".")[2]: value}]}
    outer, _, inner = name.partition(".")
    return {outer: {inner: value} if inner else value}


OTHER: tuple[object, ...] = (
    0, 1, 2, -1, 0.5, True, False, "", "none", "auto", "required", "high", [], ["x"], [{}], {},
    {"a": 1}, {"type": "function", "function": {"name": "f"}},
)  # fmt: skip
"""Values of every type that OpenAI's fields have."""


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_value_that_asks_for_nothing_changes_nothing_and_any_other_is_refused(name: str) -> None:
    neutral = {msgspec.json.encode(value) for value in NEUTRAL[name]}
    for value in (None, *NEUTRAL[name]):
        assert asks(**placed(name, value)) == asks(), value
    for value in OTHER:
        same = msgspec.json.encode(value) in neutral
        if not same:
            found = fault(**placed(name, value)) or ""
            assert re.sub(r"\[\d+\]", "", found) == name, value


@pytest.mark.parametrize(
    "fields",
    [
        dict.fromkeys(("temperature", "session", "tools", "store", "chat_template_kwargs")),
        {"messages": [{**CHAT[0], "tool_calls": None, "refusal": None, "name": None,
                       "function_call": None}]},
        {"messages": [{**CHAT[0], "tool_calls": []}]},
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": False},
        {"tool_choice": "auto", "parallel_tool_calls": True, "stop": [""]},
        {"x_anything": [1]},
        {"messages": [{"role": "user", "content": [
            {"type": "text", "text": "Bring", "image_url": None},
            {"type": "refusal", "refusal": " the cup.", "annotations": None},
        ]}]},
        {"response_format": {"type": "text", "json_schema": None}},
        {"stream_options": {"include_usage": False}},
        {"chat_template_kwargs": {}},
        {"temperature": 0, "top_p": 0.8, "top_k": 20},
        {"top_p": 1.0, "top_k": -1, "min_p": 0},
        {"n": 1.0},
    ],
    ids=str,
)  # fmt: skip
def test_what_asks_for_nothing_is_as_if_left_out(fields: dict[str, Any]) -> None:
    assert asks(**fields) == asks()


def test_sampling_is_passed_on() -> None:
    how = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.01, "seed": 2**63 - 1}
    how["acceptance"] = "rejection"
    request = asks(**how)
    assert {name: getattr(request, name) for name in how} == how


def test_a_schema_keeps_its_nulls() -> None:
    schema = {"const": None, "default": None, "stop": [], "n": 2}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    assert asks(response_format=form).json_schema == schema


def test_system_messages_in_a_row_are_one() -> None:
    def turns(*messages: tuple[str, object]) -> list[tuple[str, str]]:
        chat = [{"role": role, "content": text} for role, text in messages]
        return [(turn.role, turn.content) for turn in asks(messages=chat).messages or ()]

    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    assert turns(("system", "a"), ("developer", parts), ("user", "x"), ("user", "y")) == [
        ("system", "a\n\nbc"), ("user", "x"), ("user", "y"),
    ]  # fmt: skip
    # A template decides about one that is not first.
    assert turns(("user", "x"), ("system", "a")) == [("user", "x"), ("system", "a")]


@pytest.mark.parametrize(
    ("turn", "name"), [(0, "messages[0..1]"), (1, "messages[2]"), (2, "messages[3]")]
)
def test_an_error_of_the_server_names_the_message_that_was_sent(turn: int, name: str) -> None:
    chat = read(msgspec.json.encode({"messages": [*SYSTEMS, *CHAT, *SYSTEMS[:1]]}))
    field = f"messages[{turn}].content"
    sent = error(bad_request(f"{field} must be another (got one)", field), chat)["error"]
    assert (sent["param"], sent["message"].split()[0]) == (f"{name}.content",) * 2


@pytest.mark.parametrize("absent", [{"content": None}, {}])
def test_an_answer_without_text_is_an_empty_one(absent: dict[str, None]) -> None:
    found = asks(messages=[*CHAT, {"role": "assistant", **absent}, *CHAT]).messages
    assert [turn.content for turn in found or ()] == ["Bring the cup.", "", "Bring the cup."]


@pytest.mark.parametrize(
    ("fields", "thinking"),
    [
        ({"chat_template_kwargs": {"enable_thinking": False}}, "off"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "on"),
        ({"chat_template_kwargs": {"enable_thinking": False}, "thinking": "off"}, "off"),
    ],
    ids=str,
)
def test_thinking_is_chosen_in_the_words_of_each_client(
    fields: dict[str, Any], thinking: str
) -> None:
    assert asks(**fields) == asks(thinking=thinking)


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        (
            {"chat_template_kwargs": {"preserve_thinking": False, "reasoning_effort": "medium"}},
            {"preserve_thinking": False, "reasoning_effort": "medium"},
        ),
        ({"reasoning_effort": "high"}, None),  # the server knows the template
        ({"chat_template_kwargs": {"enable_thinking": True}}, None),
    ],
    ids=str,
)
def test_efforts_and_preserved_thinking_are_for_the_chat_template(
    fields: dict[str, Any], options: dict[str, Any] | None
) -> None:
    found = asks(**fields)
    assert found.chat_template_kwargs == options
    assert found.reasoning_effort == fields.get("reasoning_effort")


def test_one_limit_may_be_given_in_both_words() -> None:
    assert asks(max_tokens=5, max_completion_tokens=5).max_tokens == 5


def test_what_is_taken_without_effect_has_none() -> None:
    found = DOCUMENT.partition("Taken, and without effect:")[2].partition(".\n")[0]
    plain = {"type": "json_schema", "json_schema": {"schema": {}}}
    more = {"type": "json_schema", "json_schema": {"schema": {}, "strict": False, "name": "a"}}
    named = [{**CHAT[0], "name": "Ann"}]
    for extra in (
        {"user": "u"}, {"metadata": {"a": "b"}}, {"safety_identifier": "u"},
        {"prompt_cache_retention": "24h"}, {"messages": named},
        {"response_format": more},
    ):  # fmt: skip
        assert asks(**{"response_format": plain, **extra}) == asks(response_format=plain)
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
    text = DOCUMENT.partition("Errors are OpenAI's")[2].partition(". A path")[0]
    found = {
        word: int(status)
        for status, words in re.findall(r"(\d{3})\s\(([^)]*)\)", text)
        for word in re.findall(r"`(\w+)`", words)
    }
    assert found == {code: status for code, status in STATUS.items() if status != 400}


def test_tools_go_on_as_they_came() -> None:
    """Their order and their keys are part of the prompt."""
    tool = {"function": {"strict": None, "name": "f", "parameters": {"default": None}},
            "type": "function"}  # fmt: skip
    named = {"type": "function", "function": {"name": "f"}}
    found = asks(tools=[tool], tool_choice=named, parallel_tool_calls=False)
    assert msgspec.json.encode(found.tools) == msgspec.json.encode([tool])
    assert (found.tool_choice, found.parallel_tool_calls) == (named, False)
    assert asks(tools=[tool]).tool_choice is None
    assert asks(tool_choice="required").tool_choice == "required"  # for the server to refuse


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_calls_come_back_and_results_keep_the_places_that_errors_name(
    content: dict[str, Any],
) -> None:
    first = '{"x": 1e400, "y": 0.10}'
    calls = called(first) | content
    calls["tool_calls"] += called({"label": None})["tool_calls"]
    calls["tool_calls"][1] |= {"id": "call_2", "index": None}
    results = [{"role": "tool", "tool_call_id": f"call_{i}", "content": [
        {"type": "text", "text": str(i)}]} for i in (2, 1)]  # fmt: skip
    _, answer, *turns = asks(messages=[*CHAT, calls, *results]).messages or ()
    assert answer.content == ""
    assert [c["function"]["arguments"] for c in answer.tool_calls or ()] == [
        first, '{"label": null}',
    ]  # fmt: skip
    assert [(turn.content, turn.tool_call_id) for turn in turns] == [
        ("2", "call_2"), ("1", "call_1"),
    ]  # fmt: skip


def test_a_prediction_is_a_draft() -> None:
    assert asks(prediction={"type": "content", "content": "old"}).drafts == "old"
    parts = [{"type": "text", "text": "o"}, {"type": "text", "text": "ld"}]
    assert asks(prediction={"type": "content", "content": parts}).drafts == "old"
    assert asks(prediction=None).drafts is None
    assert fault(prediction={"type": "tokens", "content": "old"}) == "prediction.type"


def test_a_refused_prediction_is_named_as_it_was_sent() -> None:
    chat = {"messages": CHAT, "prediction": {"type": "content", "content": "old"}}
    refused = PlanError("bad_request", "drafts must be left out (got old)", field="drafts")
    sent = error(refused, read(msgspec.json.encode(chat)))["error"]
    assert sent["param"] == "prediction"
    assert sent["message"] == "prediction must be left out (got old)"


def test_any_object_is_asked_for_as_a_schema() -> None:
    assert asks(response_format={"type": "json_object"}).json_schema == {"type": "object"}


def test_a_name_of_the_conversation_is_a_hint_and_nothing_else() -> None:
    def named(header: str = "", **fields: Any) -> PlanRequest:
        request = read(msgspec.json.encode({"messages": CHAT, **fields}))
        return plan_request(request, Caller(session=header, scope="s"))

    assert named("a", prompt_cache_key="b").conversation == "a"
    assert named(prompt_cache_key="b").conversation == "b"
    assert named(prompt_cache_key="").conversation is None
    long = [named("x" * 65 + str(i)).conversation for i in range(2)]
    assert long[0] != long[1]
    assert (named("a").session, named("a").preempt, named("a").cache_scope) == (None, "none", "s")
    assert fault(cache_scope="other") == "cache_scope"
