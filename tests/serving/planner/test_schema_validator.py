"""How much work a schema may make of the check of a plan, which blocks the whole interpreter."""

from __future__ import annotations

import time
from typing import Any

import pytest

from thor_dflash.core.errors import PlanError
from thor_dflash.runtime.grammar.schema import MAX_BYTES, read
from thor_dflash.serving.planner.plan_schema import from_skills
from thor_dflash.serving.planner.schema_validator import MAX_PASSES, SchemaValidator, passes

Schema = dict[str, Any]
NEVER: Schema = {"type": "object", "required": ["x"], "properties": {"x": False}}
WRAPPED = {
    "allOf": lambda one: {"allOf": [one, one]},
    "anyOf": lambda one: {"anyOf": [one, one]},
    "oneOf": lambda one: {"oneOf": [one, one]},
    "items": lambda one: {"items": {"anyOf": [one, one]}},
    "prefixItems": lambda one: {"prefixItems": [one, one]},
    "properties": lambda one: {"properties": {"$defs": one, "const": one}},
    "additionalProperties": lambda one: {"additionalProperties": {"anyOf": [one, one]}},
}
"""Two places for a subschema, by keyword."""


def ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def chain(links: int, keyword: str = "anyOf", last: Schema = NEVER) -> Schema:
    """A schema of so many definitions that each refer twice to the one before, up to `a{links}`."""
    defs = {"a0": last}
    for i in range(1, links + 1):
        defs[f"a{i}"] = WRAPPED[keyword](ref(f"a{i - 1}"))
    return {"$defs": defs}


def below(name: str) -> Schema:
    """An object with something under `c` that obeys a definition."""
    return {"type": "object", "properties": {"c": ref(name)}, "required": ["c"]}


def refused(schema: Schema) -> bool:
    """Whether the schema is refused, which may be for the number of its subschemas only."""
    try:
        SchemaValidator(read(schema))
    except PlanError as e:
        if "at most 100000 subschemas with every $ref written out (got more)" in e.message:
            return True
        raise
    return False


@pytest.mark.parametrize("keyword", WRAPPED)
def test_definitions_that_double_with_each_ref_are_refused(keyword: str) -> None:
    assert refused({**chain(20, keyword), **ref("a20")})
    few = {**chain(12, keyword), "anyOf": [ref("a12"), {}]}
    assert SchemaValidator(read(few)).valid({})


def test_a_check_that_is_taken_is_a_moment() -> None:
    """Also by a schema inside itself, whose definitions double for the value and for its part."""
    schemas = [
        {**chain(links, last=last), "anyOf": [ref(f"a{links}"), {}]}
        for links in range(4, 20)
        for last in (NEVER, {"anyOf": [NEVER, below(f"a{links}")]})
    ]
    begun = time.perf_counter()
    taken = [schema for schema in schemas if not refused(schema)]
    counting = time.perf_counter() - begun
    assert 8 < len(taken) < len(schemas)
    value: Schema = {}
    for _ in range(20):
        value = {"c": value}
    for checker in (SchemaValidator(read(one)) for one in taken):
        begun = time.perf_counter()
        assert checker.valid(value)
        assert time.perf_counter() - begun < counting


def test_no_way_around_through_what_no_value_holds_hides_a_definition() -> None:
    schema = chain(40)
    for i in range(40):
        # Counted from a0, each definition would be inside the one before.
        schema["$defs"][f"a{i}"]["properties"] = {"none": ref(f"a{i + 1}")}
    assert refused({**schema, "anyOf": [ref("a0"), ref("a40"), {}]})


def test_long_lists_of_what_is_refused_count_too() -> None:
    for last in ({"anyOf": [False] * 1000}, {"enum": [*range(500), *([i] for i in range(250))]}):
        assert refused({**chain(7, last=last), **ref("a7")})
        SchemaValidator(read({**chain(5, last=last), **ref("a5")}))
    for found_at_once in ([f"word {i}" for i in range(1000)], [*range(1000)]):
        assert not refused({**chain(7, last={"enum": found_at_once}), **ref("a7")})


@pytest.mark.parametrize("name", ["a/b", "a~b", "a%b", "a b", "ä", "$defs", "~1"])
def test_a_ref_is_followed_however_its_name_is_written(name: str) -> None:
    schema = from_skills({name: {"object": "object"}}, {"object": ["mug"]}, numbered=False)
    SchemaValidator(read(schema))
    schema["$defs"] |= {**chain(40)["$defs"], f"args.{name}": ref("a40")}
    assert refused(schema)


def test_schemas_that_planners_use_are_far_from_the_limit() -> None:
    many = {f"skill{i}": {"object": "object", "place": "place"} for i in range(20)}
    ids = {"object": [f"o{i}" for i in range(100)], "place": [f"p{i}" for i in range(20)]}
    tree = {"anyOf": [below("tree"), {"properties": {"all": {"items": ref("tree")}}}, {"const": 1}]}
    for schema in (from_skills(many, ids), {"$defs": {"tree": tree}, **ref("tree")}):
        assert passes(read(schema), MAX_PASSES) <= MAX_PASSES // 10


def test_no_schema_without_ref_has_too_many() -> None:
    long = {"enum": [0] * ((MAX_BYTES - 100) // 2)}
    wide = {"allOf": [{}] * ((MAX_BYTES - 100) // 3)}
    assert all(passes(read(schema), MAX_PASSES) <= MAX_PASSES for schema in (long, wide))


def test_a_schema_of_nothing_but_itself_is_counted() -> None:
    for itself in ({"$ref": "#"}, {"anyOf": [{"$ref": "#"}, {"$ref": "#"}, {"type": "object"}]}):
        assert not refused(itself)


@pytest.mark.parametrize("op", ["plan", "validate"])
def test_a_server_refuses_it_before_a_plan_runs(house: Any, op: str) -> None:
    server, held = house.held()
    schema = {**chain(40), "anyOf": [ref("a40"), {"type": "object"}]}
    reply = house.peer(server).ask(op=op, id="a", prompt="x", json_schema=schema)
    assert (reply["code"], reply["field"]) == ("schema_invalid", "json_schema")
    assert not held.started
