"""Lints a JSON schema for answers of unbounded length."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import cast

from thor_dflash.core.strict_records import as_list, as_table
from thor_dflash.runtime.grammar.schema_limits import nodes

_ENDLESS = re.compile(r"[*+]|\{\d*,\}")
"""Unbounded repetition in a pattern. May be a false positive inside a character class, which is
acceptable for a lint."""


def lint(schema: str) -> tuple[str, ...]:
    """Report what lets an answer grow without end: it may then fill max_tokens and be cut off."""
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
