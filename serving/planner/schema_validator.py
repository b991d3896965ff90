"""Validates a plan against its JSON Schema, independently of the grammar that produced it."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast
from urllib.parse import unquote

import jsonschema_rs

from thor_dflash.core.errors import PlanError
from thor_dflash.core.message_text import cut, show, visible

MOST_PATTERNS = 64
"""Most regular expressions in a schema. Compiling one blocks the whole interpreter, so the server
answers nobody meanwhile."""
PATTERN_BYTES = 1 << 20
"""Largest compiled pattern: some 800 repetitions of any character, compiled in 5 ms."""
MOST_PASSES = 100_000
"""Most subschemas that a check passes for one value, with every $ref written out. The validator
follows each $ref anew, so that a chain of definitions that each refer twice to the one before takes
2^n passes, and it blocks the whole interpreter meanwhile. No schema without $ref that is small
enough to be taken has so many; `from_skills` makes 2,900 for ten skills and 40 objects."""

_REFS = frozenset(("$ref", "$dynamicRef", "$recursiveRef"))
_LITERALS = frozenset(("const", "enum"))
_UNUSED = frozenset(("$defs", "definitions", "default", "examples"))
_NAMED = frozenset(("properties", "patternProperties", "dependentSchemas", "dependencies"))
_SAME = frozenset("allOf anyOf oneOf not if then else dependentSchemas dependencies".split())
"""Their subschemas describe the same value, those of other keywords a part of it."""

Table = Mapping[str, object]


def _offline(uri: str) -> NoReturn:
    raise ValueError(f"a schema must hold all it refers to (got {uri})")


class Checker:
    """A compiled schema. Never uses the network, whatever the schema refers to."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        """Compile a schema.

        Raises:
            PlanError: schema_invalid; schema_unsupported for a $ref that only a validator follows.
        """
        if (count := _patterns(schema)) > MOST_PATTERNS:
            raise PlanError(
                "schema_invalid",
                f"json_schema must have at most {MOST_PATTERNS} patterns (got {count})",
                field="json_schema",
            )
        sized = jsonschema_rs.FancyRegexOptions(size_limit=PATTERN_BYTES)
        try:
            self._validator: Any = jsonschema_rs.validator_for(
                dict(schema), retriever=_offline, pattern_options=sized
            )
        except (ValueError, jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError) as e:
            text = visible(str(e).splitlines()[0][:200])
            if text.endswith('is not a "regex"'):
                text += f" that compiles to at most {PATTERN_BYTES} bytes"
            place = _place(e)
            raise PlanError(
                "schema_invalid", f"json_schema must be a JSON Schema (got{place}: {text})",
                field="json_schema",
            ) from e  # fmt: skip
        if _Passes(schema).above(MOST_PASSES):
            raise PlanError(
                "schema_invalid",
                f"json_schema must have at most {MOST_PASSES} subschemas with every $ref written "
                "out (got more)",
                field="json_schema",
            )

    def valid(self, value: object) -> bool:
        """Whether a value obeys the schema."""
        return bool(self._validator.is_valid(value))


def _place(error: Exception) -> str:
    """Say where in the schema the error is, as far as it is known."""
    path = error.instance_path if isinstance(error, jsonschema_rs.ValidationError) else []
    return f" at {visible(cut('.'.join(map(str, path))))}" if path else ""


def _patterns(schema: object) -> int:
    """Count regular expressions at any depth. A string inside a `const` may be counted as one."""
    count, left = 0, [schema]
    while left:
        node = left.pop()
        if isinstance(node, Mapping):
            table = cast("Mapping[str, object]", node)
            named = table.get("patternProperties")
            count += isinstance(table.get("pattern"), str)
            count += len(cast("Sized", named)) if isinstance(named, Mapping) else 0
            left += table.values()
        elif isinstance(node, list):
            left += cast("list[object]", node)
    return count


@dataclass(slots=True)
class _Part:
    """A subschema, and those that are passed with it."""

    own: int = 1
    """How many passes it counts for: also one for each subschema that is true or false, and for
    each value of its literals that is compared one by one."""
    same: list[Table] = field(default_factory=list[Table])
    """Those that describe the same value."""
    inner: list[Table] = field(default_factory=list[Table])
    """Those that describe a part of the value."""

    def add(self, schema: object, *, same: bool) -> None:
        if isinstance(schema, Mapping):
            (self.same if same else self.inner).append(cast("Table", schema))
        else:
            self.own += isinstance(schema, bool)


class _Passes:
    """Counts the subschemas of a schema with every $ref written out.

    The validator remembers what it found by a schema inside itself for each object and list, but
    not for other values and empty ones. So inside itself a schema is written out only as far as it
    describes the same value. In which order the validator follows definitions that contain each
    other is its own affair: counted are all ways from the top on which none repeats, which include
    those that it takes.
    """

    def __init__(self, schema: Table) -> None:
        self._schema = schema
        self._parts: dict[int, _Part] = {}
        """By the identity of their tables."""

    def above(self, most: int) -> bool:
        """Whether there are more than `most`; takes time for so many only.

        Raises:
            PlanError: schema_unsupported.
        """
        count, around = 0, set[tuple[int, bool]]()
        left = [(self._schema, False, False)]  # a list, since chains of $ref may be very long
        while left and count <= most:
            table, again, done = left.pop()
            if done:
                around.remove((id(table), again))
                continue
            again |= (id(table), again) in around
            if (id(table), again) in around:
                count += 1
                continue
            around.add((id(table), again))
            part = self._part(table)
            count += part.own
            left.append((table, again, True))
            left += [(one, again, False) for one in part.same]
            left += [(one, again, False) for one in part.inner if not again]
        return count > most

    def _part(self, table: Table) -> _Part:
        if (part := self._parts.get(id(table))) is None:
            part = self._parts[id(table)] = _Part()
            for key, value in table.items():
                self._enter(part, key, value)
        return part

    def _enter(self, part: _Part, key: str, value: object) -> None:
        if key in _REFS and isinstance(value, str):
            part.add(self._target(value), same=True)
        elif key in _LITERALS:
            part.own += _literals(value)
        elif key in _NAMED and isinstance(value, Mapping):
            for one in cast("Table", value).values():
                part.add(one, same=key in _SAME)
        elif key not in _UNUSED:
            for one in cast("list[object]", value) if isinstance(value, list) else [value]:
                part.add(one, same=key in _SAME)

    def _target(self, ref: str) -> object:
        top, *steps = unquote(ref).split("/")
        node: Any = self._schema
        try:
            if top != "#":
                raise KeyError(top)
            for step in steps:
                name = step.replace("~1", "/").replace("~0", "~")
                node = node[int(name) if isinstance(node, list) else name]
        except (LookupError, TypeError, ValueError) as e:
            raise PlanError(
                "schema_unsupported",
                f"json_schema must refer by # or a path like #/$defs/NAME only (got {show(ref)})",
                field="json_schema",
            ) from e
        return node


def _literals(value: object) -> int:
    left = list(cast("list[object]", value)) if isinstance(value, list) else [value]
    if all(type(one) is int for one in left):
        return 1  # looked up at once, as strings are; others are compared one by one
    count = 0
    while left:
        node = left.pop()
        count += not isinstance(node, str)
        if isinstance(node, Mapping):
            left += cast("Table", node).values()
        elif isinstance(node, list):
            left += cast("list[object]", node)
    return count
