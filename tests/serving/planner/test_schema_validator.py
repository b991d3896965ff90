"""How much work a schema may make of the check of a plan, which blocks the whole interpreter."""

from __future__ import annotations

import time
from typing import Any

import pytest

from thor_dflash.core.errors import PlanError
from thor_dflash.runtime.grammar.schema import read
from thor_dflash.serving.planner.schema_validator import SchemaValidator

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
        for links in range(4, 20, 3)
        for last in (NEVER, {"anyOf": [NEVER, below(f"a{links}")]})
    ]
    begun = time.perf_counter()
    taken = [schema for schema in schemas if not refused(schema)]
    counting = time.perf_counter() - begun
    assert 2 < len(taken) < len(schemas)
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


@pytest.mark.parametrize("op", ["plan", "validate"])
def test_a_server_refuses_it_before_a_plan_runs(house: Any, op: str) -> None:
    server, held = house.held()
    schema = {**chain(40), "anyOf": [ref("a40"), {"type": "object"}]}
    reply = house.peer(server).ask(op=op, id="a", prompt="x", json_schema=schema)
    assert (reply["code"], reply["field"]) == ("schema_invalid", "json_schema")
    assert not held.started
