"""What a JSON schema must be before a grammar is made of it, and what about it can run away."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from thor_dflash.errors import RequestError
from thor_dflash.records import as_list, as_table, check_utf8, show

MAX_BYTES = 128 << 10
"""Longest schema, bytes of compact JSON. Ten skills over forty objects are about 6 KB."""
MAX_DEPTH = 64
"""Deepest nesting of the schema's own JSON. A plan's is 12; the compiler gives up at 128."""
MAX_BOUND: Mapping[type, int] = {int: 2**53 - 1, float: (2**53 - 1) // 10}
"""Largest bound of a number, either way. The compiler keeps bounds as float64, one written with a
point as all its digits over ten, and makes int64 of them: larger ones would change in silence, and
the lowest make it crash."""

_BOUNDS = frozenset("minimum maximum exclusiveMinimum exclusiveMaximum".split())
_PLAIN = _BOUNDS | frozenset(
    "type const enum required minItems maxItems minLength maxLength pattern format $ref".split()
)
_NOTES = frozenset("title description default examples deprecated $comment $schema".split())
"""Say nothing about what is valid."""
_ONE = frozenset(("items", "additionalProperties"))
_MANY = frozenset(("anyOf", "oneOf", "allOf", "prefixItems"))
_NAMED = frozenset(("properties", "$defs", "definitions"))
KEYWORDS = _PLAIN | _NOTES | _ONE | _MANY | _NAMED
"""All others are refused by name: the compiler would ignore some of them in silence."""

_ENDLESS = re.compile(r"[*+]|\{\d*,\}")
"""What makes a pattern match without end. Inside a class it is a false alarm: a lint may be one."""


@dataclass(frozen=True, slots=True)
class Node:
    """One schema inside a schema."""

    where: str
    """Dotted path, `schema` at the top."""
    table: Mapping[str, object]


def text_of(schema: str | Mapping[str, Any]) -> str:
    """The schema as compact JSON, its keys in the order given: an answer's keys come in that order.

    Raises:
        RequestError: no JSON object, too long, too deep, or with an unsupported keyword or bound.
    """
    table = _table(schema)
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False, default=_no_json)
    check_utf8("schema", text)
    if (size := len(text.encode())) > MAX_BYTES:
        raise RequestError(f"schema must be at most {MAX_BYTES} bytes of JSON (got {size})")
    for node in nodes(table):
        for key in node.table:
            if key not in KEYWORDS:
                raise RequestError(f"{node.where} must have supported keywords only (got {key})")
        _check_bounds(node)
    return text


def _check_bounds(node: Node) -> None:
    for key, value in node.table.items():
        most = MAX_BOUND.get(type(value)) if key in _BOUNDS else None
        if most and isinstance(value, int | float) and not -most <= value <= most:
            raise RequestError(f"{node.where}.{key} must be {-most} to {most} (got {show(value)})")


def _table(schema: str | Mapping[str, Any]) -> dict[str, object]:
    if isinstance(schema, str) and len(schema) > MAX_BYTES:
        raise RequestError(f"schema must be at most {MAX_BYTES} bytes of JSON (got {len(schema)})")
    try:
        value: object = json.loads(schema) if isinstance(schema, str) else dict(schema)
        deep = _depth(value)
    except RecursionError as e:
        raise RequestError(f"schema must be nested at most {MAX_DEPTH} deep (got more)") from e
    except ValueError as e:
        raise RequestError(f"schema must be JSON (got: {e})") from e
    if deep > MAX_DEPTH:
        raise RequestError(f"schema must be nested at most {MAX_DEPTH} deep (got {deep})")
    table = as_table(value)
    if table is None:
        raise RequestError(f"schema must be an object (got {show(value)})")
    return table


def _no_json(value: object) -> object:
    raise RequestError(f"schema must be JSON (got a value of type {type(value).__name__})")


def _depth(value: object) -> int:
    inner = as_list(value)
    if inner is None:
        inner = list((as_table(value) or {}).values())
        if not isinstance(value, dict):
            return 0
    return 1 + max((_depth(item) for item in inner), default=0)


def nodes(schema: Mapping[str, object], where: str = "schema") -> Iterator[Node]:
    """The schema and every schema inside it, outermost first.

    Raises:
        RequestError: a keyword's value is not what the keyword takes.
    """
    yield Node(where, schema)
    for key, value in schema.items():
        for name, inner in _inside(key, value, f"{where}.{key}"):
            table = as_table(inner)
            if table is not None:
                yield from nodes(table, name)
            elif not isinstance(inner, bool):
                raise RequestError(f"{name} must be a schema (got {show(inner)})")


def _inside(key: str, value: object, where: str) -> list[tuple[str, object]]:
    if key in _ONE:
        return [(where, value)]
    if key in _MANY:
        rows = as_list(value)
        if rows is None:
            raise RequestError(f"{where} must be a list of schemas (got {show(value)})")
        return [(f"{where}[{i}]", row) for i, row in enumerate(rows)]
    if key in _NAMED:
        table = as_table(value)
        if table is None:
            raise RequestError(f"{where} must be an object of schemas (got {show(value)})")
        return [(f"{where}.{name}", row) for name, row in table.items()]
    return []


def lint(schema: str) -> tuple[str, ...]:
    """What in a schema lets an answer grow without end: it may then fill max_tokens and be cut."""
    table = cast("dict[str, object]", json.loads(schema))
    found = [f"{n.where} {rule}" for n in nodes(table) for rule in _endless(n.table)]
    return tuple(found + _recursive(table))


def _endless(node: Mapping[str, object]) -> Iterator[str]:
    if node.keys() & {"const", "enum", "$ref", "anyOf", "oneOf", "allOf"}:
        return
    kind = node.get("type")
    kinds = as_list(kind) or [kind]
    if kind is None:
        yield "must have a type (got none: anything is allowed)"
    if "string" in kinds and _endless_text(node):
        yield "must have maxLength (got a string of any length)"
    if "array" in kinds and "maxItems" not in node and node.get("items") is not False:
        yield "must have maxItems (got an array of any length)"
    if "object" in kinds and node.get("additionalProperties") is not False:
        yield "must have additionalProperties false (got an object with any keys)"
    if "number" in kinds:
        yield "must be an integer or an enum (got a number with any count of digits)"
    if "integer" in kinds and not _between(node):
        yield "must have minimum and maximum (got an integer of any size)"


def _endless_text(node: Mapping[str, object]) -> bool:
    if "maxLength" in node or "format" in node:
        return False
    pattern = node.get("pattern")
    return not isinstance(pattern, str) or bool(_ENDLESS.search(pattern))


def _between(node: Mapping[str, object]) -> bool:
    low, high = {"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"}
    return bool(node.keys() & low) and bool(node.keys() & high)


def _recursive(schema: Mapping[str, object]) -> list[str]:
    """Definitions that contain themselves."""
    refs = {
        f"#/{group}/{name}": _refs(cast("dict[str, object]", body))
        for group in ("$defs", "definitions")
        for name, body in (as_table(schema.get(group)) or {}).items()
        if isinstance(body, dict)
    } | {"#": _refs(schema)}
    return [
        f"{name} must not contain itself (got a schema of any depth)"
        for name in refs
        if name in _reached(name, refs)
    ]


def _reached(name: str, refs: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    front = refs[name]
    while front:
        seen |= front
        front = {to for at in front for to in refs.get(at, set())} - seen
    return seen


def _refs(schema: Mapping[str, object]) -> set[str]:
    return {str(n.table["$ref"]) for n in nodes(schema) if "$ref" in n.table}
