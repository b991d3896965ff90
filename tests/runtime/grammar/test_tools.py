"""The laws of tool calls: a grammar holds frame or values, and a drafter changes nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import numpy as np
import pytest
from support.constrained_model import asked, session, text
from support.loop_models import DEAD, drafts, erring, hostile, oracle

from thor_dflash.core.errors import RequestError
from thor_dflash.runtime.decoding.block import Block, DecodeProgress, Policy
from thor_dflash.runtime.decoding.proposers import DflashDrafter, NoDrafter, Proposer
from thor_dflash.runtime.grammar.compiler import Grammar
from thor_dflash.runtime.grammar.policy import Constrain, ForbidToken, Place
from thor_dflash.runtime.grammar.schema import JsonSchema, read
from thor_dflash.runtime.grammar.tools import ToolUse, call_grammar
from thor_dflash.runtime.session import Request
from thor_dflash.runtime.text.tool_calls import CallPiece, Tool, ToolCall, ToolCallParser

MOVE = Tool(
    "move_to",
    {
        "type": "object",
        "properties": {
            "label": {"type": "string", "maxLength": 6},
            "frame": {"enum": ["map", "base"]},
            "x": {"type": "integer", "minimum": 0, "maximum": 30},
            "opts": {
                "type": "object",
                "properties": {"fast": {"type": "boolean"}},
                "required": ["fast"],
                "additionalProperties": False,
            },
        },
        "required": ["frame", "x"],
    },
)
STOP = Tool("stop")
USE = ToolUse(tools=(MOVE, STOP))
ANSWER = read({"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"],
               "additionalProperties": False})  # fmt: skip
Kind = Literal["auto", "required", "named", "strict", "one", "union"]
KINDS: dict[Kind, tuple[ToolUse, JsonSchema | None]] = {
    "auto": (USE, None),
    "required": (replace(USE, choice="required"), None),
    "named": (replace(USE, choice="required", only=frozenset(("stop",))), None),
    "strict": (replace(USE, tools=(replace(MOVE, strict=True),)), None),
    "one": (replace(USE, parallel=False), None),
    "union": (USE, ANSWER),
}


def marks() -> tuple[int, int]:
    found = text().call_marks
    assert found is not None
    return found


@cache
def grammar(kind: Kind) -> Grammar:
    return session().call_grammar(*KINDS[kind])


@dataclass
class Opening(Policy):
    """Makes the target itself open a call after `at` tokens, wherever that is in a block."""

    at: int

    def shape(self, progress: DecodeProgress, block: Block) -> Block:
        row = self.at - len(progress.tokens)
        if not 0 <= row < 16:
            return block
        return replace(block, soft=(*[-1] * row, marks()[0]), soft_margin=1e9)


def decode(kind: Kind, proposer: Proposer, *, thinking: bool, at: int = -1) -> list[int]:
    """All tokens of an answer whose calls obey a grammar; a call is opened after `at` tokens."""
    made = grammar(kind)
    request = replace(asked(thinking, max_tokens=160), tools=KINDS[kind][0])
    place = Place(thinking=thinking, opening=made.opening, text=made.free)
    policies = (*([Opening(at)] if at >= 0 else []), Constrain(made, place))
    return [t for chunk in session().run(request, proposer, policies) for t in chunk.tokens]


def parsed(tokens: list[int]) -> tuple[str, list[ToolCall]]:
    parser = ToolCallParser({t.name: t for t in USE.tools}, marks(), text().bytes_of)
    pieces = [piece for token in tokens for piece in parser.feed(token)] + list(parser.end())
    return "".join(p for p in pieces if not isinstance(p, CallPiece)), parser.calls


def legal(call: ToolCall, *, values: bool) -> bool:
    arguments = json.loads(call.arguments)
    if call.name == "stop":
        return arguments == {}
    known = {*MOVE.parameters["properties"]}
    frame = call.name == "move_to" and {"frame", "x"} <= arguments.keys() <= known
    if not values:
        return frame
    opts = arguments.get("opts", {"fast": True})
    return bool(
        frame
        and arguments["frame"] in ("map", "base")
        and arguments["x"] in range(31)
        and len(arguments.get("label", "")) <= 6
        and isinstance(opts["fast"], bool)
    )


@pytest.mark.parametrize("kind", ["required", "named", "union", "auto", "strict", "one"])
@pytest.mark.parametrize("thinking", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_calls_obey_and_a_drafter_changes_nothing(kind: Kind, thinking: bool) -> None:
    at = 7 if kind in ("auto", "strict", "one") or thinking else -1
    truth = decode(kind, NoDrafter(), thinking=thinking, at=at)
    rng = np.random.default_rng(3)
    others: list[Proposer] = [
        DEAD,
        hostile(truth),
        oracle(truth),
        erring(truth, 0.2, 5),
        DflashDrafter(),
        drafts(lambda n: [int(t) for t in rng.choice([*marks(), 3, 90, 200], 15)]),
    ]
    for proposer in others:
        assert decode(kind, proposer, thinking=thinking, at=at) == truth
    _, calls = parsed(truth)
    values = kind not in ("auto", "one")
    assert all(legal(call, values=values) for call in calls)
    if kind == "union" and not thinking:
        assert calls or json.loads(text().decode(truth)) in ({"n": 1}, {"n": 2})
    if kind == "named":
        assert {call.name for call in calls} == {"stop"}
    assert truth.count(marks()[0]) <= 1 or kind != "one"


def test_a_call_ends_the_thinking() -> None:
    truth = decode("named", NoDrafter(), thinking=True, at=9)
    report = session().report()
    assert truth[9] == marks()[0]
    assert report.close == "call"
    assert report.usage.thinking_tokens == 9


def test_a_token_that_is_forbidden_never_comes() -> None:
    request = asked(False, max_tokens=60)
    free = [t for c in session().run(request, NoDrafter()) for t in c.tokens]
    vocab = session().manifest.vocab_limit
    for token in (free[3], 31, 1231):
        policy = ForbidToken(token, session().model.block, vocab)
        plain = [t for c in session().run(request, NoDrafter(), (policy,)) for t in c.tokens]
        assert token not in plain
        assert plain[:3] == free[:3]
        drafted = [t for c in session().run(request, oracle(free), (policy,)) for t in c.tokens]
        assert drafted == plain


def spelt(*parts: str | int) -> list[int]:
    return [t for p in parts for t in (text().encode(p) if isinstance(p, str) else [p])]


def call(name: str, *arguments: tuple[str, str]) -> list[int]:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)
    return spelt(marks()[0], f"\n<function={name}>\n{body}</function>\n", marks()[1])


FRAME, X = ("frame", "map"), ("x", "3")


@pytest.mark.parametrize(
    ("kind", "tokens", "good"),
    [
        ("auto", lambda: call("move_to", X, FRAME), True),
        ("auto", lambda: call("move_to", FRAME, X, ("label", "long and </b>\n")), True),
        ("auto", lambda: call("move_to", ("frame", "anything"), ("x", "many")), True),
        ("auto", lambda: call("move_to", FRAME), False),
        ("auto", lambda: call("move_to", FRAME, X, X), False),
        ("auto", lambda: call("move_to", FRAME, X, ("other", "1")), False),
        ("auto", lambda: call("jump"), False),
        ("auto", lambda: [*call("stop"), *spelt("\n"), *call("stop")], True),
        ("one", lambda: [*call("stop"), *spelt("\n"), *call("stop")], False),
        ("named", lambda: call("move_to", FRAME, X), False),
        ("strict", lambda: call("move_to", FRAME, X, ("opts", '{"fast": true}')), True),
        ("strict", lambda: call("move_to", FRAME, X, ("opts", '{"fast":true}')), False),
        ("strict", lambda: call("move_to", ("frame", "maps"), X), False),
        ("strict", lambda: call("move_to", FRAME, ("x", "31")), False),
        ("strict", lambda: call("move_to", FRAME, X, ("label", "seven")), True),
        ("strict", lambda: call("move_to", FRAME, X, ("label", "a\nb</")), True),
        ("strict", lambda: call("move_to", FRAME, X, ("label", "seven77")), False),
        ("union", lambda: spelt('{"n":2}'), True),
        ("union", lambda: spelt('{"n":3}'), False),
    ],
)
def test_what_a_grammar_takes(kind: Kind, tokens: Any, good: bool) -> None:
    matcher, ids = grammar(kind).begin(), tokens()
    taken = matcher.try_consume_tokens(ids)
    assert (taken == len(ids) and matcher.is_accepting()) == good


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ('^[^"/]+$', ["a\\b", "<a>"], ['a"b', "a/b"]),
        ("^a|b$", ["ax", "xb"], ["xax", "bx"]),
        ("^(?:a|b)$", ["a"], ["ax", "xb"]),
        ("a/b|^$", ["a/b", "xa/by"], ["ab"]),
        (r"\$$", ["a$"], ["a"]),
        (r"^\d$", ["1"], ["\u0661"]),
    ],
)
def test_a_pattern_of_a_strict_tool_is_that_of_json_schema(
    pattern: str, good: list[str], bad: list[str]
) -> None:
    """Of a string, which is written raw, and of one inside a list, which is JSON."""
    one = {"type": "string", "pattern": pattern}
    many = {"type": "array", "items": one, "minItems": 1}
    tool = Tool("f", {"properties": {"s": one, "l": many}}, strict=True)
    begin = session().call_grammar(replace(USE, choice="required", tools=(tool,))).begin
    for value in (*good, *bad):
        for given in (("s", value), ("l", json.dumps([value], ensure_ascii=False))):
            ids = call("f", given)
            assert (begin().try_consume_tokens(ids) == len(ids)) == (value in good), given


def test_anchors_inside_of_a_strict_tools_pattern_are_refused() -> None:
    for pattern in ("(^a|b)c", "(a|b$)", "x^a"):
        tool = Tool("f", {"properties": {"k": {"type": "string", "pattern": pattern}}}, strict=True)
        with pytest.raises(RequestError, match=r"properties\.k\.pattern must have \^ and \$ only"):
            call_grammar(replace(USE, tools=(tool,)), marks())


DEFS = {"$defs": {
    "hue": {"type": "string", "enum": ["red", "a</b"]},
    "a": {"$ref": "#/$defs/b"},
    "b": {"$ref": "#/$defs/a"},
    **{f"d{i}": {"anyOf": 9 * [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(9)},
    "d9": {"type": "null"},
}}  # fmt: skip


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "format": "date"},
        {"type": "object", "minProperties": 1},
        {"not": {}},
        # Each of these was taken for another schema, or for the text of a grammar.
        {"type": "string", "maxLength": "9})/ | /.*"},
        {"type": "string", "maxLength": -1},
        {"type": "string", "maxLength": True},
        {"type": "string", "minLength": 2, "maxLength": 1},
        {"type": "string", "pattern": 5},
        {"type": "string", "pattern": "a?" * 2049},
        {"type": "array", "items": {"type": "string", "pattern": "a?" * 2049}},
        {"type": []},
        {"type": ["strin"]},
        {"type": [["string"]]},
        {"enum": 5},
        {"enum": []},
        {"enum": ["a</parameter>"]},
        {"anyOf": 5},
        {"anyOf": []},
        {"anyOf": [False]},
        False,
        [1],
        # References to nowhere, in a circle, to billions of alternatives, to another place.
        {"$ref": "#/$defs/none"},
        {"$ref": 5},
        {"$ref": "#/$defs/a"},
        {"$ref": "#/$defs/d0"},
        {"type": "object", "properties": {"k": {"$ref": "#"}}},
    ],
    ids=lambda schema: json.dumps(schema)[:60],
)
def test_a_strict_value_that_cannot_be_enforced_is_refused_by_name(schema: Any) -> None:
    tool = Tool("f", {"properties": {"k": schema}, **DEFS}, strict=True)
    with pytest.raises(RequestError, match=r"tools\[0\]\.function\.parameters\.properties\.k"):
        call_grammar(replace(USE, tools=(tool,)), marks())
    session().call_grammar(replace(USE, tools=(replace(tool, strict=None),)))


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"$ref": "#/$defs/hue"}, ["red", "a</b"], ['"red"', "blue"]),
        ({"allOf": [{"$ref": "#/$defs/hue"}], "default": "red"}, ["red"], ['"red"']),
        ({"anyOf": [{"$ref": "#/$defs/hue"}, {"type": "null"}]}, ["red", "null"], ["nul"]),
        ({"type": "array", "items": {"$ref": "#/$defs/hue"}}, ['["red"]'], ["[red]", "red"]),
        ({"type": ["string", "null"], "enum": ["x", None]}, ["x", "null"], ["y"]),
    ],
)
def test_a_reference_of_a_strict_tool_is_what_it_leads_to(
    schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    """As pydantic writes enumerations and optional values."""
    tool = Tool("f", {"properties": {"k": schema}, **DEFS}, strict=True)
    begin = session().call_grammar(replace(USE, choice="required", tools=(tool,))).begin
    for value in (*good, *bad):
        ids = call("f", ("k", value))
        assert (begin().try_consume_tokens(ids) == len(ids)) == (value in good), value


def test_definitions_are_not_copied_without_end() -> None:
    many = {f"d{i}": {"type": "integer", "title": "t" * 99} for i in range(600)}
    keys = {f"k{i}": {"type": "array", "items": {"$ref": "#/$defs/d0"}} for i in range(99)}
    tool = Tool("f", {"properties": keys, "$defs": many}, strict=True)
    with pytest.raises(RequestError, match="^tools must have a grammar of <= "):
        call_grammar(replace(USE, tools=(tool,)), marks())


def test_many_parameters_come_in_order() -> None:
    keys = {f"k{i}": {"type": "string"} for i in range(80)}
    made = session().call_grammar(
        ToolUse(tools=(Tool("f", {"properties": keys, "required": ["k3"]}),))
    )
    for arguments, good in (
        ((("k1", "a"), ("k3", "b"), ("k79", "c")), True),
        ((("k1", "a"),), False),
    ):
        matcher, ids = made.begin(), call("f", *arguments)
        assert (matcher.try_consume_tokens(ids) == len(ids)) == good


def test_forced_ids_of_a_call_are_its_canonical_tokens() -> None:
    ids, matcher, forced = call("move_to", X, FRAME), grammar("auto").begin(), 0
    for i, token in enumerate(ids):
        if ahead := matcher.compute_ff_tokens():
            assert ahead[0] == token, i
            forced += 1
        assert matcher.consume_token(token)
    assert forced > len(ids) / 5


def test_a_request_with_tools_goes_through_admission() -> None:
    request: Request = asked(False, max_tokens=80)
    required = replace(USE, choice="required")
    made = session().call_grammar(required)
    tokens = [
        t
        for c in session().generate(replace(request, tools=required, grammar=made))
        for t in c.tokens
    ]
    assert tokens[0] == marks()[0]
    none = replace(request, tools=replace(USE, choice="none"))
    tokens = [t for c in session().generate(none) for t in c.tokens]
    assert marks()[0] not in tokens
