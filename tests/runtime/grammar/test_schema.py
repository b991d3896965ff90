"""Which schemas are accepted, what the refusals of others say, and what the lint warns of."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
from support.constrained_model import PLAN, SMALL, session, text

from thor_dflash.core.errors import CompilerBusy, RequestError
from thor_dflash.runtime.grammar.compiler import KEPT, Grammars, within
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
        (
            {"type": "array", "uniqueItems": True},
            r"supported keywords only \(got \"uniqueItems\"\)",
        ),
        ({"type": "integer", "multipleOf": 999983}, r"keywords only \(got \"multipleOf\"\)"),
        ({"properties": {"a": {"not": {}}}}, r"schema.properties.a must have .* \(got \"not\"\)"),
        ({"items": {"anyOf": [{}, {"if": {}}]}}, r"schema.items.anyOf\[1\] must .* \(got \"if\"\)"),
        ({"x-guidance": {"whitespace_flexible": True}}, r"keywords only \(got \"x-guidance\"\)"),
        ({"nullable": True}, r"keywords only \(got \"nullable\"\)"),
        ({"patternProperties": {}}, r"keywords only \(got \"patternProperties\"\)"),
        ({"properties": []}, r"schema.properties must be an object of schemas \(got \[\]\)"),
        ({"anyOf": {}}, r"schema.anyOf must be a list of schemas"),
        ({"items": 3}, r"schema.items must be a schema \(got 3\)"),
        ({"type": "strin"}, r"can be compiled \(got: Invalid type: strin\)"),
        ({"enum": []}, r"can be compiled \(got: Unsatisfiable"),
        ({"type": "string", "pattern": "(?=a)b"}, r"can be compiled \(got: regex .*look-around"),
        ({"type": "string", "format": "foo"}, r"can be compiled \(got: Unknown format: foo"),
        ({"$ref": "http://robots.example/plan"}, r"schema.\$ref must be #, or a path like"),
        ({"$ref": "#/$defs/none"}, r"inside this one \(got \"#/\$defs/none\"\)"),
        ({"const": object()}, r"schema must be JSON \(got a value of type object\)"),
        ({"minimum": "1"}, r"can be compiled \(got: "),
        ({"const": "\ud800"}, r"schema must be UTF-8 \(got: surrogates not allowed at 10\)"),
        ('{"title": "\\ud800"}', r"schema must be UTF-8"),
    ],
)
def test_a_schema_is_refused_by_what_is_wrong_with_it(schema: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        session().grammar(schema)


@pytest.mark.parametrize("key", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
@pytest.mark.parametrize(
    ("value", "said"),
    [
        (1e25, r"1e\+25"),
        (-1e25, r"-1e\+25"),
        (10**25, f"{10**25}"),
        (2**53, f"{2**53}"),
        (900719925474100.0, r"900719925474100\.0"),
        (-900719925474100.0, r"-900719925474100\.0"),
        (-(2**63), f"-{2**63}"),
        (float("inf"), "Infinity"),
        (float("nan"), "NaN"),
    ],
)
def test_a_bound_that_the_compiler_would_change_is_refused(
    key: str, value: float, said: str
) -> None:
    # Apart from the type: another part of the schema may say what it is that is bounded.
    schema = {"allOf": [{"type": "integer"}, {key: value}]}
    most = 9007199254740991 if isinstance(value, int) else 900719925474099
    wrong = rf"schema.allOf\[1\].{key} must be -{most} to {most} \(got {said}\)"
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
    ("schema", "said"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, r"schema.exclusiveMinimum .* \(got 0 and 0.5\)"),
        ({"exclusiveMaximum": -1.0, "minimum": -1.25}, r"Maximum .* \(got -1.0 and -1.25\)"),
        ({"exclusiveMinimum": 3, "exclusiveMaximum": 3.9}, r"Minimum .* \(got 3 and 3.9\)"),
        (
            {"anyOf": [{"$ref": "#/$defs/far"}], "exclusiveMinimum": 9},
            r"schema.exclusiveMinimum .* \(got 9 and 9.5\)",
        ),
    ],
)
def test_a_whole_bound_that_would_be_taken_for_an_inclusive_one(schema: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        session().grammar({"type": "number", "$defs": {"far": {"maximum": 9.5}}} | schema)


@pytest.mark.parametrize(
    ("schema", "out"),
    [
        ({"exclusiveMinimum": 0, "maximum": 1}, "0"),
        ({"exclusiveMaximum": -1, "minimum": -2}, "-1"),
        ({"exclusiveMinimum": 0.5, "maximum": 0.75}, "0.5"),
        ({"exclusiveMinimum": 0, "allOf": [{"maximum": 2.5}]}, "0"),
    ],
)
def test_exclusive_bounds_are_exclusive(schema: Any, out: str) -> None:
    matcher = session().grammar({"type": "number"} | schema).matcher.deep_copy()
    tokens = text().encode(out)
    assert matcher.try_consume_tokens(tokens) < len(tokens) or not matcher.is_accepting()


@pytest.mark.parametrize(
    "inner",
    [
        {"type": "string", "nullable": True},
        {"type": "integer", "multipleOf": 999983},
        {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 3},
    ],
)
@pytest.mark.parametrize(("place", "ref"), [("default", "default"), ("examples", "examples/0")])
def test_what_is_no_schema_cannot_be_brought_in_as_one(inner: Any, place: str, ref: str) -> None:
    schema = {place: inner if place == "default" else [inner], "items": {"$ref": f"#/{ref}"}}
    with pytest.raises(RequestError, match=rf"schema.items.\$ref must be #, .*#/{ref}"):
        session().grammar(schema)


def test_a_ref_may_lead_to_any_schema() -> None:
    found = {"anything": True, "a/~ b": {"prefixItems": [{"type": "null"}]}}
    refs = ("#/$defs/anything", "#/$defs/a~1~0%20b/prefixItems/0", "#/properties/x0")
    schema = {f"x{i}": {"$ref": ref} for i, ref in enumerate(refs)}
    session().grammar({"type": "object", "$defs": found, "properties": schema})


def test_the_order_of_keys_is_kept() -> None:
    order = ["z", "a", "m"]
    schema = {"type": "object", "properties": dict.fromkeys(order, STRING), "required": order}
    assert list(json.loads(read(schema).text)["properties"]) == order
    assert read(json.dumps(schema, indent=3)).text == read(schema).text


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "string"}, ["schema must have maxLength"]),
        ({"type": "string", "pattern": "^a+$"}, ["schema must have maxLength"]),
        ({"type": "string", "pattern": "^a{2,4}$"}, []),
        ({"type": "string", "format": "date"}, []),
        ({"type": ["string", "null"], "maxLength": 4}, []),
        ({"type": "array", "items": STRING}, ["schema must have maxItems"]),
        ({"type": "array", "prefixItems": [STRING], "items": False}, []),
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
def test_what_can_grow_without_end_is_named(schema: Any, said: list[str]) -> None:
    found = read(schema).warnings()
    assert len(found) == len(said), found
    assert all(line.startswith(start) for line, start in zip(found, said, strict=True))
    assert session().grammar(schema).warnings == found


def test_a_compilation_is_not_waited_for_without_end() -> None:
    begin = time.perf_counter()
    with pytest.raises(RequestError, match=r"must compile within 0.05 s \(got one that does not\)"):
        within(0.05, lambda: time.sleep(5))
    assert time.perf_counter() - begin < 1
    assert within(1, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        within(1, lambda: 1 // 0)


def test_a_compilation_that_timed_out_has_the_compiler_until_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manifest = session().manifest
    grammars = Grammars(text(), manifest.vocab_limit, manifest.stop_tokens, seconds=0.05)
    free = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(Grammars, "_compile", lambda *_: free.wait(10))
        busy = "must be compiled on its own"
        for message in ("within 0.05 s", busy, busy):
            with pytest.raises(RequestError, match=message) as caught:
                grammars.compile(SMALL)
            assert isinstance(caught.value, CompilerBusy) == (message == busy)
        free.set()
        assert grammars._compiler.acquire(timeout=20)
        grammars._compiler.release()
    assert grammars.compile(SMALL).schema == read(SMALL).text
    with pytest.raises(RequestError, match="can be compiled"):
        grammars.compile({"enum": []})
    assert grammars.compile({"const": 1}).schema == '{"const":1}'


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


def test_an_object_too_wide_for_llguidance_is_said_to_be_that() -> None:
    keys = {f"k{i}": {"type": "integer"} for i in range(600)}
    wide = {"type": "object", "properties": keys, "additionalProperties": False}
    begins = text().encode("{")
    with pytest.raises(RequestError, match=r"within llguidance's limits \(got: .*items"):
        session().grammar(wide).takes(begins)
    with pytest.raises(RequestError, match=r"must allow some answer \(got one that is too .*items"):
        session().grammar({"type": "object", "properties": {"a": wide}, "required": ["a"]})
    needed = session().grammar({**wide, "required": list(keys)})
    assert needed.takes(begins)
    assert not needed.takes(text().encode("["))


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
