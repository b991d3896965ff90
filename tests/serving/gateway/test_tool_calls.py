"""Tool calls over HTTP: OpenAI's own client against the gateway over mock servers."""

from __future__ import annotations

import http.client
import json
import re
from typing import Any

import msgspec
import pytest
from openai import BadRequestError
from support.http_gateway import CHAT, client, gateway

from thor_dflash.config.serving import ServeConfig
from thor_dflash.serving.gateway import openai_answers
from thor_dflash.serving.planner.backend import Prepared
from thor_dflash.serving.planner.mock_backend import PLAN, MockBackend
from thor_dflash.serving.protocol import messages

MOVE: Any = {"type": "function", "function": {"name": "move_to", "parameters": {
    "type": "object", "properties": {"label": {"type": "string"}, "x": {"type": "number"}},
    "required": ["label", "x"]}}}  # fmt: skip
STOP: Any = {"type": "function", "function": {"name": "stop"}}
ARGUMENTS = '{"label": "mock", "x": 1.5}'
NAMED: Any = {"type": "function", "function": {"name": "stop"}}
ALLOWED: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}


def test_a_loop_of_calls_whole_and_streamed(house: Any) -> None:
    with gateway(house.mock().endpoints[0]) as address, client(address) as openai:
        create = openai.chat.completions.create
        ask: Any = {"model": "mock", "messages": CHAT, "tools": [MOVE, STOP]}
        answer = create(**ask)
        [choice] = answer.choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        [call] = choice.message.tool_calls
        assert (call.type, call.function.name) == ("function", "move_to")
        assert call.function.arguments == ARGUMENTS
        extras = answer.thor_dflash
        assert extras.keys() == set(openai_answers.EXTRAS)
        assert (extras["finish_reason"], extras["cut_call"]) == ("tool_calls", None)
        assert extras["notes"] == []
        assert extras["thinking_budget"] == ServeConfig().thinking_budget
        assert extras["reuse"]["held"] == answer.usage.prompt_tokens_details.cached_tokens

        deltas, last = streamed(create, **ask)
        ids = {one.id for one in deltas}
        begin, *rest = deltas
        assert (begin.index, begin.type, begin.function.name) == (0, "function", "move_to")
        assert begin.function.arguments == ""
        assert {(one.index, one.id, one.function.name) for one in rest} == {(0, None, None)}
        assert len(rest) > 1, "an argument is sent as it is decoded"
        assert "".join(one.function.arguments for one in rest) == ARGUMENTS
        assert last.choices[0].finish_reason == "tool_calls"
        made = {call.id, *(one for one in ids if one)}
        assert len(made) == 2
        assert all(re.fullmatch("call_[0-9a-f]{24}", one) for one in made)

        back = [*CHAT, choice.message.model_dump(exclude_none=True),
                {"role": "tool", "tool_call_id": call.id, "content": "there"}]  # fmt: skip
        after = create(**{**ask, "messages": back})
        assert (after.choices[0].finish_reason, after.choices[0].message.content) == ("stop", PLAN)
        assert after.choices[0].message.tool_calls is None


def streamed(create: Any, **ask: Any) -> tuple[list[Any], Any]:
    """The deltas of tool calls, without one of text, and the last piece with a choice."""
    pieces = [piece for piece in create(**ask, stream=True) if piece.choices]
    assert all(piece.choices[0].delta.content is None for piece in pieces)
    found = [one for piece in pieces for one in piece.choices[0].delta.tool_calls or ()]
    return found, pieces[-1]


def test_the_parts_of_several_calls_merge_to_those_of_a_whole_answer() -> None:
    """As clients merge them, by index; ids differ between calls and between answers."""
    calls = [("stop", "{}"), ("move_to", ARGUMENTS), ("stop", "{}")]
    answer, other = (openai_answers.ResponseHeader("mock") for _ in range(2))
    merged: dict[int, dict[str, Any]] = {}
    for at, (name, text) in enumerate(calls):
        parts = [messages.CallDelta(index=at, name=name)]
        parts += [messages.CallDelta(index=at, arguments=one) for one in text]
        parts += [messages.CallDelta(index=at, done=True)]
        for piece in (one for part in parts for one in openai_answers.call_deltas(answer, part)):
            [delta] = piece["choices"][0]["delta"]["tool_calls"]
            if (index := delta.pop("index")) not in merged:
                merged[index] = delta
            else:
                assert delta.keys() == {"function"}
                merged[index]["function"]["arguments"] += delta["function"]["arguments"]
    results = tuple(
        messages.CallResult(name=name, arguments=json.loads(text), text=text)
        for name, text in calls
    )
    result = messages.Result(finish_reason="tool_calls", tool_calls=results, text="")
    whole = [
        openai_answers.completion(one, result)["choices"][0]["message"]["tool_calls"]
        for one in (answer, other)
    ]
    assert list(merged.values()) == whole[0]
    assert len({call["id"] for calls in whole for call in calls}) == 6


CHOICES: list[tuple[dict[str, Any], str | None]] = [
    ({"tool_choice": "none"}, None),
    ({"tool_choice": "auto"}, "move_to"),
    ({"tool_choice": "required", "parallel_tool_calls": False}, "move_to"),
    ({"tool_choice": NAMED}, "stop"),
    ({"tool_choice": ALLOWED}, "stop"),
    ({"response_format": {"type": "json_object"}}, "move_to"),
    ({"response_format": {"type": "json_object"}, "tool_choice": "none"}, None),
]


def test_every_choice_of_tools(house: Any) -> None:
    with gateway(house.mock().endpoints[0]) as address, client(address) as openai:
        for fields, name in CHOICES:
            answer = openai.chat.completions.create(
                model="", messages=CHAT, tools=[MOVE, STOP], **fields
            )
            message = answer.choices[0].message
            names = [call.function.name for call in message.tool_calls or ()]
            assert names == ([name] if name else []), fields
            assert (message.content is None) == (name is not None), fields
            assert answer.thor_dflash["plan_valid"] is (name is None), fields


def test_a_call_that_is_cut_is_left_out(house: Any) -> None:
    schema = {"properties": {"text": {"enum": ["one two three"]}}, "required": ["text"]}
    say = {"type": "function", "function": {"name": "say", "parameters": schema}}
    ask: Any = {"model": "", "messages": CHAT, "max_tokens": 2, "tools": [say]}
    with gateway(house.mock().endpoints[0]) as address, client(address) as openai:
        create = openai.chat.completions.create
        answer = create(**ask)
        deltas, last = streamed(create, **ask)
    [choice] = answer.choices
    assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)
    assert (last.choices[0].finish_reason, deltas[0].function.name) == ("length", "say")
    assert last.thor_dflash["cut_call"] == answer.thor_dflash["cut_call"] == 0
    assert last.thor_dflash["notes"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [STOP, STOP]}, "tools[1].function.name"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [MOVE], "tool_choice": NAMED}, "tool_choice.function.name"),
    ({"reasoning_effort": "none", "extra_body": {"thinking": "on"}}, "reasoning_effort"),
    (
        {
            "reasoning_effort": "low",
            "extra_body": {"chat_template_kwargs": {"reasoning_effort": "low"}},
        },
        "reasoning_effort",
    ),
]


def test_what_cannot_be_is_refused_by_name(house: Any) -> None:
    with gateway(house.mock().endpoints[0]) as address, client(address) as openai:
        for fields, param in REFUSED:
            with pytest.raises(BadRequestError) as caught:
                openai.chat.completions.create(model="", messages=CHAT, **fields)
            assert caught.value.param == param


class Recorder(MockBackend):
    """A mock that keeps what it was asked, and of which client."""

    def __init__(self) -> None:
        super().__init__(ServeConfig())
        self.asked: list[tuple[messages.PlanRequest, str]] = []

    def prepare(
        self, ask: messages.PlanRequest, left_ms: float | None, scope: str = "", *images: Any
    ) -> Prepared:
        self.asked.append((ask, scope))
        return super().prepare(ask, left_ms, scope, *images)


def test_who_asks_and_in_which_conversation(house: Any) -> None:
    """A scope comes from the key alone, and two gateways give one key two scopes."""
    recorder = Recorder()
    server = house.serve(recorder)
    with gateway(server.endpoints[0]) as one, gateway(server.endpoints[0]) as other:
        for address, key in ((one, "a"), (one, "a"), (one, "b"), (other, "a"), (one, "")):
            post(address, key, {"messages": CHAT, "temperature": 0, "prompt_cache_key": "k"})
        post(one, "a", {"messages": CHAT}, **{"X-Session-ID": "talk"})
    scopes = [ask.cache_scope for ask, _ in recorder.asked]
    assert scopes[0] == scopes[1] == scopes[5]
    assert len({*scopes}) == 4
    assert scopes[4] is None
    assert all(scope != "a" for scope in scopes)
    assert [ask.conversation for ask, _ in recorder.asked] == ["k"] * 5 + ["talk"]
    sessions = {ask.session for ask, _ in recorder.asked}  # each its own, made by the client
    assert len(sessions) == 6
    assert not sessions & {"k", "talk"}
    assert {ask.preempt for ask, _ in recorder.asked} == {"none"}


def post(address: str, key: str, body: object, **headers: str) -> dict[str, Any]:
    """The answer to a request with a key, if it is not empty, and these headers."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=20)
    given = {"Authorization": f"Bearer {key}"} if key else {}
    connection.request(
        "POST", "/v1/chat/completions", json.dumps(body),
        {"Content-Type": "application/json", **given, **headers},
    )  # fmt: skip
    answer: dict[str, Any] = msgspec.json.decode(connection.getresponse().read())
    connection.close()
    return answer
