"""Tool calls are parsed alike however their ids arrive, and values keep what the model wrote."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thor_dflash.runtime.text.tokenizer import Answer, Tokenizer
from thor_dflash.runtime.text.tool_calls import CallPiece, Tool, ToolCallParser

NANO = Path(__file__).parents[3] / "models/planner-nano/target"

OPEN, CLOSE = 1000, 1001
TOOLS = {
    "move": Tool(
        "move",
        {
            "properties": {
                "label": {"type": "string"},
                "zip": {"type": "string"},
                "frame": {"enum": ["map", "base"]},
                "n": {"type": "integer"},
                "x": {"type": "number"},
                "flag": {"type": "boolean"},
                "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "count": {"anyOf": [{"$ref": "#/$defs/count"}, {"type": "null"}]},
                "opts": {"type": "object"},
                "free": {"description": "no type"},
            },
            "$defs": {"count": {"type": "integer"}},
        },
    ),
    "stop": Tool("stop"),
}


ODD = 'a < b && "c" \\ </param> <parameter=x>'


def parser(words: dict[int, bytes] | None = None) -> ToolCallParser:
    words = words or {}
    return ToolCallParser(TOOLS, (OPEN, CLOSE), lambda i: words.get(i) or bytes([i]))


def ids(*parts: str | int) -> list[int]:
    return [i for part in parts for i in (part.encode() if isinstance(part, str) else (part,))]


def call(*arguments: tuple[str, str], name: str = "move") -> list[int]:
    """As the chat template writes it."""
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)
    return ids(OPEN, f"\n<function={name}>\n{body}</function>\n", CLOSE)


def run(tokens: list[int], p: ToolCallParser | None = None) -> tuple[str, list[tuple[str, str]]]:
    """Text, and name and arguments of each call put together from its pieces."""
    p = p or parser()
    text, names, arguments, done = "", {}, {}, set[int]()
    for piece in [piece for token in tokens for piece in p.feed(token)] + list(p.end()):
        if isinstance(piece, CallPiece):
            assert piece.index not in done, "nothing may follow the end of a call"
            assert (piece.index in names) != bool(piece.name), "only the first piece has the name"
            names.setdefault(piece.index, piece.name)
            arguments[piece.index] = arguments.get(piece.index, "") + piece.arguments
            done |= {piece.index} if piece.done else set()
        else:
            assert piece
            text += piece
    assert [(c.name, c.arguments) for c in p.calls] == [
        (names[i], arguments[i]) for i in sorted(done)
    ]
    return text, [(c.name, c.arguments) for c in p.calls]


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("zip", "03106", "03106"),
        ("label", "", ""),
        ("label", "null", "null"),
        ("label", "  two spaces, then a line\n", "  two spaces, then a line\n"),
        ("label", "\nboth edges\n", "\nboth edges\n"),
        (
            "label",
            'a < b && "c" \\ </param> <parameter=x>',
            'a < b && "c" \\ </param> <parameter=x>',
        ),
        ("label", "<tool_call> in plain text, é漢😀", "<tool_call> in plain text, é漢😀"),
        ("frame", "map", "map"),
        ("free", "12", "12"),
        ("unknown", "true", "true"),
        ("n", "7", 7),
        ("x", "0.10", 0.1),
        ("flag", "true", True),
        ("flag", "False", False),
        ("maybe", "null", None),
        ("maybe", "None", None),
        ("maybe", "nullable", "nullable"),
        ("count", "3", 3),
        ("count", "null", None),
        ("opts", '{"a": [1, null]}', {"a": [1, None]}),
    ],
)
def test_a_value_has_the_type_that_its_schema_says(key: str, written: str, value: Any) -> None:
    p = parser()
    tokens = call((key, written))
    _, [(name, arguments)] = run(tokens, p)
    assert (name, json.loads(arguments)) == ("move", {key: value})
    assert not p.notes
    at_once = parser({2000: bytes(tokens[1:-1])})
    assert run([OPEN, 2000, CLOSE], at_once) == ("", [(name, arguments)])


def test_numbers_keep_their_characters() -> None:
    _, [(_, arguments)] = run(call(("x", "1e400"), ("n", "12345678901234567890123"), ("x", "0.10")))
    assert arguments == '{"x": 1e400, "n": 12345678901234567890123, "x": 0.10}'


@pytest.mark.parametrize(
    ("key", "written"),
    [
        ("n", "seven"),
        ("n", "1.5"),
        ("flag", "yes"),
        ("x", "NaN"),
        ("opts", "{'a': 1}"),
        ("count", "[" * 9999),
    ],
)
def test_what_fits_no_type_is_a_string_and_noted(key: str, written: str) -> None:
    p = parser()
    _, [(_, arguments)] = run(call((key, written)), p)
    assert json.loads(arguments) == {key: written}
    assert len(p.notes) == 1


def test_calls_and_text_around_them() -> None:
    one, two = call(("n", "1")), call(name="stop")
    text, calls = run(ids("Let me see.\n\n", *one, "\n", *two, "\n"))
    assert (text, calls) == ("Let me see.", [("move", '{"n": 1}'), ("stop", "{}")])
    assert run(ids(*one, "\nand more\n"))[0] == "\nand more"
    assert run(ids("no call\n"))[0] == "no call\n"
    assert run(ids("a bare <function=move> in prose")) == ("a bare <function=move> in prose", [])


def test_a_missing_line_break_before_the_end_tag_swallows_nothing() -> None:
    body = "<function=move><parameter=label>a</parameter><parameter=n>2</parameter></function>"
    assert run(ids(OPEN, body, CLOSE)) == ("", [("move", '{"label": "a", "n": 2}')])


@pytest.mark.parametrize("cut", range(1, 57))
def test_a_call_that_is_cut_is_left_out(cut: int) -> None:
    whole, other = call(("label", "abc")), parser()
    sent = [piece for token in whole[:cut] for piece in other.feed(token)]
    for tokens in (whole[:cut], [*whole[:cut], OPEN, *call(name="stop")[1:]]):
        p = parser()
        text, calls = run(tokens, p)
        assert text == ""
        assert [name for name, _ in calls] == ["stop"] * (tokens != whole[:cut]) or cut > 53
        assert len(p.notes) == 1 or cut > 53
        left_out = "move" not in (name for name, _ in calls)
        assert p.cut == (0 if sent and left_out else None), "also when a whole call follows"


def test_a_string_is_passed_on_while_it_is_written() -> None:
    p, sent = parser(), 0
    for token in ids(OPEN, "\n<function=move>\n<parameter=label>\n", "x" * 500):
        sent += sum(len(piece.arguments) for piece in p.feed(token) if isinstance(piece, CallPiece))
    assert sent == len('{"label": "') + 500


TEXTS = st.text(st.sampled_from('ab\n<>/ "\\é漢😀=') | st.characters(codec="utf-8"), max_size=12)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.sampled_from(["label", "zip", "unknown"]), TEXTS), max_size=3),
    TEXTS,
    st.randoms(use_true_random=False),
)
def test_any_cut_into_ids_gives_the_same(
    arguments: list[tuple[str, str]], before: str, random: Any
) -> None:
    arguments = [(key, value) for key, value in arguments if "</parameter>" not in value]
    tokens = ids(before, *call(*arguments), "\n", *call(name="stop"))
    whole = run(tokens)
    assert json.loads(whole[1][0][1]) == dict(arguments)
    words: dict[int, bytes] = {}
    merged: list[int] = []
    for token in tokens:  # joins some ids into ids of several bytes
        last = words.get(merged[-1]) if merged and merged[-1] != OPEN else None
        if token < 256 and last and random.random() < 0.6:
            words[merged[-1]] = last + bytes([token])
        elif token < 256:
            merged.append(2000 + len(words))
            words[merged[-1]] = bytes([token])
        else:
            merged.append(token)
    assert run(merged, parser(words)) == whole


@pytest.mark.parametrize("thinking", [False, True])
def test_an_answer_splits_into_thinking_text_and_calls(thinking: bool) -> None:
    """A call in the thinking ends it; however many ids come at once, the result is the same."""
    text = Tokenizer.load(NANO)
    marks = text.call_marks
    assert text.marks
    assert marks
    prompt = [text.marks.open] if thinking else []
    body = "\n<function=move>\n<parameter=label>\né</parameter>\n</function>\n"
    tokens = [*text.encode("Let me."), marks[0], *text.encode(body), marks[1]]
    for width in (1, 3, 100):
        answer = Answer(text, prompt, tuple(TOOLS.values()))
        shown = [
            piece
            for at in range(0, len(tokens), width)
            for piece in answer.feed(tokens[at : at + width])
        ] + answer.end()
        assert "".join(p.text for p in shown) == "Let me."
        assert {p.thinking for p in shown} == {thinking}
        assert (answer.thinking() or answer.text()) == "Let me."
        assert bool(answer.thinking()) == thinking
        assert answer.calls is not None
        assert [(c.name, c.arguments) for c in answer.calls.calls] == [("move", '{"label": "é"}')]
        assert "".join(p.arguments for p in answer.take_calls()) == '{"label": "é"}'
        assert answer.take_calls() == []


def test_the_types_behind_references_are_found_in_the_time_of_one_walk() -> None:
    fan = {f"d{i}": {"anyOf": 6 * [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(12)}
    defs = {**fan, "d12": {"enum": [1, None]}, "round": {"$ref": "#/$defs/round"}}
    keys = {"x": {"$ref": "#/$defs/d0"}, "y": {"$ref": "#/$defs/round"}}
    tool, begin = Tool("f", {"properties": keys, "$defs": defs}), time.process_time()
    assert tool.types("x") == {"integer", "null"}
    assert tool.types("y") == {"string"}
    assert time.process_time() - begin < 0.5
