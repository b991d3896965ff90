"""Which schemas are accepted, what the refusals of others say, and what the lint warns of."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from support.constrained_model import PLAN, SMALL, session, text

from thor_dflash.core.errors import CompilerBusy, RequestError
from thor_dflash.runtime.grammar.compiler import KEPT, Grammars
from thor_dflash.runtime.grammar.schema import MAX_BYTES, read

STRING = {"type": "string", "maxLength": 5}


def nested(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        inner = {"type": "array", "maxItems": 1, "items": inner}
    return inner


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("{", r"schema must be JSON \(got: "),
        ("[1]", r"schema must be an object \(got \[1\]\)"),
        ("[" * 5000 + "]" * 5000, r"schema must be nested at most 64 deep"),
        (nested(70), r"schema must be nested at most 64 deep \(got 71\)"),
        (
            {"enum": ["x" * MAX_BYTES]},
            r"schema must be at most 131072 bytes of JSON \(got 1310\d\d\)",
        ),
        (" " * (MAX_BYTES + 1), r"schema must be at most 131072 bytes of JSON \(got 131073\)"),
        ({"properties": {"a": {"not": {}}}}, r"schema.properties.a must have .* \(got \"not\"\)"),
        ({"x-guidance": {"whitespace_flexible": True}}, r"keywords only \(got \"x-guidance\"\)"),
        ({"properties": []}, r"schema.properties must be an object of schemas \(got \[\]\)"),
        ({"type": "strin"}, r"can be compiled \(got: Invalid type: strin\)"),
        ({"type": "string", "pattern": "(?=a)b"}, r"schema.pattern must be .* without look-around"),
        ({"$ref": "http://robots.example/plan"}, r"schema.\$ref must be #, or a path like"),
        ({"const": object()}, r"schema must be JSON \(got a value of type object\)"),
        ({"const": "\ud800"}, r"schema must be UTF-8 \(got: surrogates not allowed at 10\)"),
    ],
)
def test_a_schema_is_refused_by_what_is_wrong_with_it(schema: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        session().grammar(schema)


@pytest.mark.parametrize("key", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
@pytest.mark.parametrize(
    ("value", "written"),
    [
        (1e25, r"1e\+25"),
        (2**53, f"{2**53}"),
        (-900719925474100.0, r"-900719925474100\.0"),
        (float("inf"), "Infinity"),
        (float("nan"), "NaN"),
    ],
)
def test_a_bound_that_the_compiler_would_change_is_refused(
    key: str, value: float, written: str
) -> None:
    # Apart from the type: another part of the schema may say what it is that is bounded.
    schema = {"allOf": [{"type": "integer"}, {key: value}]}
    most = 9007199254740991 if isinstance(value, int) else 900719925474099
    wrong = rf"schema.allOf\[1\].{key} must be -{most} to {most} \(got {written}\)"
    with pytest.raises(RequestError, match=wrong):
        session().grammar(schema)


@pytest.mark.parametrize("least", [-(2**53) + 1, 2**53 - 3, -900719925474099.0, 900719925474097.0])
def test_the_largest_bounds_are_exact(least: float) -> None:
    schema = {"type": "integer", "exclusiveMinimum": least, "maximum": least + 2}
    matcher = session().grammar(schema).matcher
    for off in range(-1, 4):
        tokens = text().encode(str(int(least) + off))
        tried = matcher.deep_copy()
        legal = tried.try_consume_tokens(tokens) == len(tokens) and tried.is_accepting()
        assert legal == (off in (1, 2))


@pytest.mark.parametrize(
    ("schema", "out"),
    [
        ({"exclusiveMinimum": 0, "maximum": 1}, "0"),
        ({"exclusiveMinimum": 0.5, "maximum": 0.75}, "0.5"),
        ({"exclusiveMinimum": 0, "allOf": [{"maximum": 2.5}]}, "0"),
    ],
)
def test_exclusive_bounds_are_exclusive(schema: Any, out: str) -> None:
    matcher = session().grammar({"type": "number"} | schema).matcher.deep_copy()
    tokens = text().encode(out)
    assert matcher.try_consume_tokens(tokens) < len(tokens) or not matcher.is_accepting()


def test_the_order_of_keys_is_kept() -> None:
    order = ["z", "a", "m"]
    schema = {"type": "object", "properties": dict.fromkeys(order, STRING), "required": order}
    assert list(json.loads(read(schema).text)["properties"]) == order
    assert read(json.dumps(schema, indent=3)).text == read(schema).text


@pytest.mark.parametrize(
    ("schema", "written"),
    [
        ({"type": "string"}, ["schema must have maxLength"]),
        ({"type": "string", "pattern": "^a{2,4}$"}, []),
        ({"type": "array", "items": STRING}, ["schema must have maxItems"]),
        ({"type": "object", "properties": {}}, ["schema must have additionalProperties false"]),
        ({"type": "integer", "minimum": 0}, ["schema must have minimum and maximum"]),
        ({"type": "number"}, ["schema must be an integer or an enum"]),
        ({}, ["schema must have a type"]),
        ({"anyOf": [STRING, {"type": "string"}]}, ["schema.anyOf[1] must have maxLength"]),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, STRING]}}},
            ["#/$defs/a must not contain itself"],
        ),
        (SMALL, []),
        (PLAN, []),
    ],
)
def test_what_can_grow_without_end_is_named(schema: Any, written: list[str]) -> None:
    found = read(schema).warnings()
    assert len(found) == len(written), found
    assert all(line.startswith(start) for line, start in zip(found, written, strict=True))
    assert session().grammar(schema).warnings == found


def test_a_compilation_that_timed_out_has_the_compiler_until_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manifest = session().manifest
    grammars = Grammars(text(), manifest.vocab_limit, manifest.stop_tokens, seconds=0.05)
    free = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(Grammars, "_compile", lambda *_: free.wait(10))
        busy = "must be compiled alone"
        for message in ("within 0.05 s", busy, busy):
            with pytest.raises(RequestError, match=message) as caught:
                grammars.compile(SMALL)
            assert isinstance(caught.value, CompilerBusy) == (message == busy)
        free.set()
        assert grammars._compiler.acquire(timeout=20)
        grammars._compiler.release()
    assert grammars.compile(SMALL).source == read(SMALL).text
    with pytest.raises(RequestError, match="can be compiled"):
        grammars.compile({"enum": []})
    assert grammars.compile({"const": 1}).source == '{"const":1}'


def test_a_schema_is_compiled_once_and_the_oldest_is_forgotten() -> None:
    manifest = session().manifest
    grammars = Grammars(text(), manifest.vocab_limit, manifest.stop_tokens)
    made = [grammars.compile({"const": i}) for i in range(KEPT)]
    assert grammars.compile({"const": 0}) is made[0]
    grammars.compile({"const": KEPT})
    assert grammars.compile({"const": 0}) is made[0]
    assert grammars.compile({"const": 1}) is not made[1]


def endless(needs: list[str], inner: list[str]) -> dict[str, Any]:
    """An object with the key `node`, whose value has the key `next`, whose value is another node.
    `needs` and `inner` are the keys that the outer object and a node must have.
    """
    of = {"type": "object", "additionalProperties": False}
    ref = {"$ref": "#/$defs/node"}
    node = {**of, "properties": {"next": ref}, "required": inner}
    return {**of, "$defs": {"node": node}, "properties": {"node": ref}, "required": needs}


def test_a_definition_that_must_contain_itself_has_no_value() -> None:
    with pytest.raises(RequestError, match="must allow some answer"):
        session().grammar(endless(["node"], ["next"]))
    for needs, inner, dead in (([], ["next"], True), (["node"], [], False), ([], [], False)):
        grammar = session().grammar(endless(needs, inner))
        matcher = grammar.matcher.deep_copy()
        assert matcher.consume_tokens(text().encode('{"node":{"next":{'))
        assert grammar.vocabulary.dead(matcher) is dead


def test_a_format_called_unknown_is_refused() -> None:
    """The compiler refuses formats that it does not know, but takes this word for none."""
    with pytest.raises(RequestError, match=r'schema.format must be a known format \(got "unknown"'):
        read({"type": "string", "format": "unknown"})
