"""Tool calls and reuse through the planner: a real session with random weights, and the mock."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs
from support.constrained_model import package

from thor_dflash.config.engine import EngineConfig
from thor_dflash.config.serving import ServeConfig
from thor_dflash.core.errors import ConfigError, PlanError
from thor_dflash.core.progress import Silent
from thor_dflash.runtime.grammar.schema import MAX_BYTES
from thor_dflash.runtime.session import Session, open_session
from thor_dflash.runtime.session.turn_cache import TurnCache
from thor_dflash.serving.client import Message, PlanRequest
from thor_dflash.serving.planner.backend import drive
from thor_dflash.serving.planner.mock_backend import MockBackend
from thor_dflash.serving.planner.planner import LocalPlanner
from thor_dflash.serving.planner.session_backend import SessionBackend
from thor_dflash.serving.protocol import messages

TEMPLATE = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}
{%- if m.role == 'tool' %}
<tool_response>{{ m.content }}</tool_response>
{%- else %}
{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>
<function={{ call.function.name }}>
{% for key, value in call.function.arguments | items %}<parameter={{ key }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>
{%- endfor %}
{%- endif %}<|im_end|>
{% endfor %}{{ reasoning_effort }}<|im_start|>assistant
{% if enable_thinking %}<think>
{% endif %}"""
CONFIG = ServeConfig(thinking_budget=24, max_tokens=48)
TOOLS: tuple[dict[str, Any], ...] = (
    {"type": "function", "function": {"name": "move_to", "parameters": {
        "type": "object", "properties": {"x": {"type": "integer", "maximum": 9, "minimum": 0},
                                         "how": {"enum": ["fast", "slow"]}},
        "required": ["x"]}}},
    {"type": "function", "function": {"name": "stop"}},
)  # fmt: skip
ASK = PlanRequest(prompt="Go to the table.", thinking="off", tools=TOOLS, tool_choice="required",
                  parts=("plan", "text", "thinking", "tokens", "timings"))  # fmt: skip


DEEP: list[Any] = []
for _ in range(900):
    DEEP = [DEEP]


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    made = package(template=TEMPLATE)
    with closing(open_session(made, EngineConfig(threads=1), Silent(), reuse=8 << 20)) as it:
        yield it


@pytest.fixture(scope="module")
def planner(session: Session) -> LocalPlanner:
    return LocalPlanner(SessionBackend(session, CONFIG))


def streamed(planner: LocalPlanner, ask: PlanRequest) -> tuple[list[str], messages.Result]:
    """The arguments of each call as its chunks spell them, and the result."""
    calls: list[str] = []
    *chunks, result = planner.stream(structs.replace(ask, stream="text"))
    for chunk in chunks:
        if isinstance(chunk, messages.Chunk) and chunk.kind == "call":
            assert chunk.call
            if chunk.call.name:
                calls.append("")
            calls[-1] += chunk.call.arguments
    assert isinstance(result, messages.Result)
    return calls, result


@pytest.mark.parametrize("thinking", ["off", "on"])
def test_a_demanded_call_is_made(planner: LocalPlanner, thinking: Any) -> None:
    ask = structs.replace(ASK, thinking=thinking, parallel_tool_calls=False, max_tokens=120)
    result = planner.plan(ask)
    assert result.finish_reason in ("tool_calls", "length")
    if result.finish_reason == "tool_calls":
        [call] = result.tool_calls or ()
        assert json.loads(call.text) == call.arguments
        assert call.name == "stop" or 0 <= call.arguments["x"] <= 9
        assert (result.status, result.plan) == ("ok", None)
    calls, again = streamed(planner, ask)
    assert again.tokens == result.tokens
    assert calls[: len(result.tool_calls or ())] == [c.text for c in result.tool_calls or ()]
    assert (again.cut_call is not None) == (len(calls) > len(result.tool_calls or ()))


def test_the_thinking_of_the_template_is_that_of_the_request(planner: LocalPlanner) -> None:
    same = structs.replace(ASK, chat_template_kwargs={"enable_thinking": False})
    assert planner.plan(same).tokens == planner.plan(ASK).tokens


def test_a_named_tool_is_called(planner: LocalPlanner) -> None:
    choice = {"type": "function", "function": {"name": "stop"}}
    result = planner.plan(structs.replace(ASK, tool_choice=choice, parallel_tool_calls=False))
    assert [(c.name, c.arguments) for c in result.tool_calls or ()] == [("stop", {})]
    assert result.finish_reason == "tool_calls"


def test_no_call_with_choice_none(planner: LocalPlanner) -> None:
    result = planner.plan(structs.replace(ASK, tool_choice="none"))
    assert result.tool_calls is None
    assert "<tool_call>" not in (result.text or "")


def test_an_answer_is_read_while_the_engine_is_idle(session: Session) -> None:
    """The next turn then reads less, and says the same; a request that waits ends the reading."""
    choice = {"type": "function", "function": {"name": "stop"}}
    found: list[tuple[int, Any]] = []
    for idle in (False, True, True):
        session.turns = TurnCache(session.model)
        session.model.state.log.chunks.clear()
        backend = SessionBackend(session, replace(CONFIG, idle_prefill=idle))
        ask = structs.replace(
            ASK, prompt="go " * 12, tool_choice=choice, parallel_tool_calls=False, session="a"
        )
        own = LocalPlanner(backend)
        first = own.plan(ask)
        call = {"function": {"name": "stop", "arguments": "{}"}}
        turns = (
            Message(role="user", content=ask.prompt or ""),
            Message(role="assistant", content="", tool_calls=(call,)),
            Message(role="tool", content="stopped"),
        )
        assert backend.idle(lambda: len(found) == 2) is None
        second = own.plan(structs.replace(ask, prompt=None, messages=turns))
        found.append((second.usage.cached_tokens, second.tokens))
        assert first.finish_reason == "tool_calls"
    (without, tokens), (ahead, again), (stopped, last) = found
    assert tokens == again == last
    assert ahead > without == stopped


def test_what_no_turn_uses_for_long_is_dropped_while_the_engine_is_idle(session: Session) -> None:
    now, clocks = 100.0, (session.answers.clock, session.turns.clock)
    session.turns = TurnCache(session.model)
    session.answers.expire(0)
    session.answers.clock = session.turns.clock = lambda: now
    try:
        for idle_s in (0.0, 30.0):
            backend = SessionBackend(session, replace(CONFIG, reuse_idle_s=idle_s))
            ask = structs.replace(ASK, session="rests", prompt="Go to the table and to the door.")
            prepared = backend.prepare(ask, None, "client")
            for _ in drive(backend.start(prepared, None)):
                pass
            assert prepared.admitted is not None
            key = prepared.admitted.conversation.key
            now += 29
            assert backend.idle(lambda: False) == (1 if idle_s else None)
            assert session.answers.of(key)  # a use, from which the time counts
            now += 29
            assert backend.idle(lambda: False) == (1 if idle_s else None)
            assert bool(session.turns.totals.expired) == bool(idle_s), "not used since the answer"
            now += 1
            assert backend.idle(lambda: False) is None
            assert bool(session.answers.of(key)) != bool(idle_s)
    finally:
        session.answers.clock, session.turns.clock = clocks


def test_a_conversation_is_dropped_by_its_name(session: Session) -> None:
    backend = SessionBackend(session, CONFIG)
    ask = structs.replace(ASK, session="ends", prompt="Go to the table and then to the door.")
    prepared = backend.prepare(ask, None, "client")
    for _ in drive(backend.start(prepared, None)):
        pass
    assert backend.prepare(ask, None, "client").cached > 0
    drop = messages.SessionDrop(session="ends")
    assert backend.drop_session(drop, "another") == 0
    assert backend.drop_session(drop, "client") > 0
    assert backend.drop_session(drop, "client") == 0


@pytest.mark.parametrize(
    ("changes", "field", "code"),
    [
        ({"tools": None}, "tool_choice", "bad_request"),
        ({"tools": (TOOLS[1], TOOLS[1])}, "tools[1].function.name", "bad_request"),
        ({"tool_choice": {"type": "x"}}, "tool_choice", "bad_request"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "jump"}}},
            "tool_choice.function.name",
            "bad_request",
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}},
            "tool_choice.allowed_tools",
            "bad_request",
        ),
        ({"chat_template_kwargs": {"colour": 1}}, "chat_template_kwargs", "bad_request"),
        (
            {"chat_template_kwargs": {"enable_thinking": True}},
            "chat_template_kwargs",
            "bad_request",
        ),
        ({"chat_template_kwargs": {"a": DEEP}}, "chat_template_kwargs", "bad_request"),
        ({"tools": ({"a": DEEP},)}, "tools", "bad_request"),
        ({"tools": ({"a": b"x"},)}, "tools", "bad_request"),
        ({"tools": ({"a": "x" * MAX_BYTES},)}, "tools", "too_large"),
        ({"tools": ({"a": "\ud800"},)}, "tools", "bad_request"),
        ({"tool_choice": {"type": DEEP}}, "tool_choice", "bad_request"),
        (
            {"prompt": None, "messages": (
                Message(role="assistant", content="", tool_calls=({"a": DEEP},)),
            )},
            "messages[0].tool_calls",
            "bad_request",
        ),
        ({"reasoning_effort": "none", "thinking": "on"}, "reasoning_effort", "bad_request"),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "low"}},
            "reasoning_effort",
            "bad_request",
        ),
        ({"json_schema": {"type": "array"}, "tool_choice": "auto"}, "json_schema", "bad_request"),
        (
            {
                "tools": (
                    {"type": "function", "function": {"name": "f", "strict": True, "parameters": {
                        "properties": {"d": {"type": "string", "format": "date"}}}}},
                )
            },
            "tools",
            "schema_unsupported",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(
    planner: LocalPlanner, changes: dict[str, Any], field: str, code: str
) -> None:
    with pytest.raises(PlanError) as e:
        planner.plan(structs.replace(ASK, **changes))
    assert e.value.field == field
    assert e.value.code in (code, "schema_unsupported")


def test_an_effort_goes_to_a_template_that_reads_it(planner: LocalPlanner) -> None:
    def prompt(**fields: Any) -> tuple[int, ...]:
        ask = PlanRequest(prompt="x", max_tokens=4, **fields)
        return planner._backend.prepare(ask, None).prompt

    groups = (("minimal", "low"), ("medium",), ("high", "xhigh", "max"))
    found = [{prompt(reasoning_effort=effort) for effort in group} for group in groups]
    assert [len(prompts) for prompts in found] == [1, 1, 1]
    assert len(set.union(*found)) == 3
    assert found[0] == {prompt(chat_template_kwargs={"reasoning_effort": "low"})}
    assert prompt(reasoning_effort="none") == prompt(thinking="off")


def turns(count: int) -> tuple[Message, ...]:
    """A tool loop: each turn repeats the turns before it."""
    found = [Message(role="user", content="Find the mug, please. " * 3)]
    for i in range(count):
        call = {"id": str(i), "type": "function", "function": {"name": "stop", "arguments": "{}"}}
        found += [
            Message(role="assistant", content="", tool_calls=(call,)),
            Message(role="tool", content=f"step {i} is done; " * 4, tool_call_id=str(i)),
        ]
    return tuple(found)


def test_a_turn_reads_only_what_is_new(planner: LocalPlanner) -> None:
    cached: list[int] = []
    for count in range(4):
        ask = structs.replace(ASK, prompt=None, messages=turns(count), max_tokens=4)
        result = planner.plan(ask)
        assert result.reuse
        assert result.reuse.held == result.usage.cached_tokens
        cached.append(result.usage.prompt_tokens - result.usage.cached_tokens)
    assert max(cached[1:]) < 32 + 100
    other = structs.replace(ASK, prompt=None, messages=turns(3), max_tokens=4, cache_scope="b")
    assert planner.plan(other).usage.cached_tokens == 0


def test_the_mock_refuses_the_tools_that_a_server_refuses() -> None:
    keys = {"x": {"type": "string", "maxLength": "9"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": keys}}}
    with closing(LocalPlanner(MockBackend(CONFIG))) as mock:
        with pytest.raises(PlanError, match=r"properties\.x\.maxLength must be") as caught:
            mock.plan(structs.replace(ASK, tools=(tool,)))
        assert (caught.value.code, caught.value.field) == ("schema_unsupported", "tools")
        mock.plan(structs.replace(ASK, tools=(tool,), tool_choice="auto"))


def test_memory_in_which_no_boundary_fits_is_refused() -> None:
    made = package(template=TEMPLATE)
    session = open_session(made, EngineConfig(threads=1), Silent(), reuse=10_000)
    with closing(session), pytest.raises(ConfigError, match=r"serve\.reuse_mb"):
        SessionBackend(session, CONFIG).warm()


def test_the_mock_calls_and_then_answers() -> None:
    with closing(LocalPlanner(MockBackend(CONFIG))) as planner:
        ask = structs.replace(ASK, tool_choice=None)
        calls, result = streamed(planner, ask)
        assert calls == ['{"x": 1}'] == [c.text for c in result.tool_calls or ()]
        assert (result.finish_reason, result.plan) == ("tool_calls", None)
        after = structs.replace(ask, prompt=None, messages=turns(1))
        assert planner.plan(after).plan is not None
