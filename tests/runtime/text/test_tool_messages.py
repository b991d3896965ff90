"""Chats with tool calls, rendered by the templates that Qwen publishes, against jinja itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.published_templates import by_jinja, published, published_template, source_of

from thor_dflash.core.errors import RequestError
from thor_dflash.runtime.text.chat_template import Template
from thor_dflash.runtime.text.messages import chat
from thor_dflash.runtime.text.tool_calls import Tool, tools_of

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "move_to", "description": "é <b>", "parameters": {
        "type": "object", "properties": {"label": {"type": "string"}, "x": {"type": "number"}},
        "required": ["x"]}}},
    {"type": "function", "function": {"name": "stop"}},
]  # fmt: skip


def call(name: str, arguments: str, id: str | None = None) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


ARGUMENTS = '{"label": "a < b\\n", "x": 0.5, "opts": {"k": [1, null, true]}, "none": null}'
LOOP: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Go."},
    {"role": "assistant", "content": "", "reasoning_content": "Hm.",
     "tool_calls": [call("move_to", ARGUMENTS, "a"), call("stop", "{}", "b")]},
    {"role": "tool", "content": "stopped", "tool_call_id": "b"},
    {"role": "tool", "content": "moved", "tool_call_id": "a"},
]  # fmt: skip


@published
@pytest.mark.parametrize("name", ["qwen36", "qwen38"])
@pytest.mark.parametrize(
    "options", [{"enable_thinking": True}, {"enable_thinking": False, "preserve_thinking": True}]
)
def test_a_loop_renders_as_jinja_renders_it(name: str, options: dict[str, Any]) -> None:
    found = published_template(name).render(chat(LOOP), tools=TOOLS, options=options)
    parsed = json.loads(json.dumps(LOOP))
    for one in parsed[2]["tool_calls"]:
        one["function"]["arguments"] = json.loads(one["function"]["arguments"])
    parsed[3:] = parsed[:2:-1]
    assert found == by_jinja(source_of(name), parsed, TOOLS, **options)
    assert found.index("moved") < found.index("stopped")


@published
def test_numbers_keep_their_characters() -> None:
    arguments = '{"x": 0.10, "y": 1e400, "in": [2.50, {"deep": 1E5}], "n": 9007199254740993}'
    calls = [call("move_to", arguments)]
    messages = [*LOOP[:2], {"role": "assistant", "content": "", "tool_calls": calls}]
    text = published_template("qwen36").render(chat(messages), tools=TOOLS)
    for number in ("\n0.10\n", "\n1e400\n", '[2.50, {"deep": 1E5}]', "9007199254740993"):
        assert number in text


@published
def test_a_template_says_what_it_reads() -> None:
    assert {"tools", "preserve_thinking"} <= published_template("qwen36").variables
    assert "reasoning_effort" in published_template("qwen38").variables


def test_a_template_without_tools_takes_no_call_silently() -> None:
    template = Template("{% for m in messages %}{{ m.content }}{% endfor %}", {}, Path())
    assert template.render(chat(LOOP[:2])) == "Be brief.Go."
    with pytest.raises(RequestError, match=r"^messages\[2\]\.tool_calls must "):
        template.render(chat(LOOP[:3]))
    with pytest.raises(RequestError, match="^tools must "):
        template.render(chat(LOOP[:2]), tools=TOOLS)


def test_results_keep_the_clients_order_where_ids_do_not_say_one() -> None:
    for ids in ((None, None), ("a", "a"), ("a", "x")):
        results = [
            {"role": "tool", "content": str(i), **({"tool_call_id": id} if id else {})}
            for i, id in enumerate(ids)
        ]
        assert [turn["content"] for turn in chat([*LOOP[:3], *results])[3:]] == ["0", "1"]


@pytest.mark.parametrize(
    ("turn", "field"),
    [
        ({"role": "user", "content": "", "tool_calls": []}, "tool_calls"),
        ({"role": "user", "content": "", "tool_call_id": "a"}, "tool_call_id"),
        ({"role": "assistant", "content": "", "tool_calls": {}}, "tool_calls"),
        (
            {"role": "assistant", "content": "", "tool_calls": [call("f", "[1]")]},
            "tool_calls[0].function.arguments",
        ),
        (
            {"role": "assistant", "content": "", "tool_calls": [call("f", "{'a': 1}")]},
            "tool_calls[0].function.arguments",
        ),
        (
            {"role": "assistant", "content": "", "tool_calls": [call("f", '{"a": NaN}')]},
            "tool_calls[0].function.arguments",
        ),
        (
            {"role": "assistant", "content": "", "tool_calls": [{**call("f", "{}"), "id": [1]}]},
            "tool_calls[0].id",
        ),
        (
            {"role": "assistant", "content": "", "tool_calls": [call("", "{}")]},
            "tool_calls[0].function.name",
        ),
    ],
)
def test_what_is_no_call_is_refused_by_name(turn: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as e:
        chat([turn])
    assert f"messages[0].{field} must" in str(e.value)


def test_tools_are_read() -> None:
    first, second = tools_of(TOOLS)
    assert first.parameters["required"] == ["x"]
    assert second == Tool("stop")


@pytest.mark.parametrize(
    ("tools", "field"),
    [
        ({}, "tools"),
        ([{"type": "custom"}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([{"type": "function", "function": {"name": "a b"}}], "tools[0].function.name"),
        ([TOOLS[1], TOOLS[1]], "tools[1].function.name"),
        ([{"type": "function", "function": {"name": "f", "x": 1}}], "tools[0].function.x"),
        (
            [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}],
            "tools[0].function.parameters",
        ),
        (
            [{"type": "function", "function": {"name": "f", "parameters": {"required": [1]}}}],
            "tools[0].function.parameters.required",
        ),
    ],
)
def test_what_is_no_tool_is_refused_by_name(tools: Any, field: str) -> None:
    with pytest.raises(RequestError) as e:
        tools_of(tools)
    assert str(e.value).startswith(f"{field} must")
