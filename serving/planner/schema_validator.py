"""Validates a plan against its JSON Schema, independently of the grammar that produced it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, cast

import jsonschema_rs

from thor_dflash.core.errors import Code, PlanError, RequestError
from thor_dflash.core.message_text import cut, visible
from thor_dflash.runtime.grammar.schema import DEFINITIONS, SAME_VALUE, JsonSchema, read
from thor_dflash.serving.protocol.errors import refusal

MAX_PATTERNS = 64
"""Most regular expressions in a schema. Compiling one blocks the whole interpreter, so the server
answers nobody meanwhile."""
PATTERN_BYTES = 1 << 20
"""Largest compiled pattern: some 800 repetitions of any character, compiled in 5 ms."""
MAX_PASSES = 100_000
"""Most subschemas that a check passes for one value, with every $ref written out. The validator
follows each $ref anew, so that a chain of definitions that each refer twice to the one before takes
2^n passes, and it blocks the whole interpreter meanwhile. No schema without $ref that is small
enough to be taken has so many; `from_skills` makes 2,900 for ten skills and 40 objects."""


def read_schema(schema: Mapping[str, Any]) -> JsonSchema:
    """Read the schema of a request.

    Raises:
        PlanError: schema_unsupported, or schema_invalid if it is no JSON Schema at all.
    """
    try:
        return read(schema)
    except RequestError as e:
        code: Code = "schema_unsupported" if _is_schema(schema) else "schema_invalid"
        raise PlanError(code, refusal(e), field="json_schema") from e


def _is_schema(schema: Mapping[str, Any]) -> bool:
    try:
        return bool(jsonschema_rs.meta.is_valid(dict(schema)))
    except (ValueError, jsonschema_rs.ReferencingError):
        return False


def _offline(uri: str) -> NoReturn:
    raise ValueError(f"a schema must hold all it refers to (got {uri})")


class SchemaValidator:
    """A compiled schema. Never uses the network, whatever the schema refers to."""

    def __init__(self, schema: JsonSchema) -> None:
        """Compile a schema.

        Raises:
            PlanError: schema_invalid.
        """
        count = sum("pattern" in one.table for one in schema.subschemas.values())
        if count > MAX_PATTERNS:
            raise _invalid(f"have at most {MAX_PATTERNS} patterns (got {count})")
        sized = jsonschema_rs.FancyRegexOptions(size_limit=PATTERN_BYTES)
        try:
            self._validator: Any = jsonschema_rs.Draft202012Validator(
                dict(schema.table), retriever=_offline, pattern_options=sized
            )
        except (ValueError, jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError) as e:
            text = visible(str(e).splitlines()[0][:200])
            if text.endswith('is not a "regex"'):
                text += f" that compiles to at most {PATTERN_BYTES} bytes"
            raise _invalid(f"be a JSON Schema (got{_place(e)}: {text})") from e
        if passes(schema, MAX_PASSES) > MAX_PASSES:
            rule = f"have at most {MAX_PASSES} subschemas with every $ref written out"
            raise _invalid(f"{rule} (got more)")

    def valid(self, value: object) -> bool:
        """Whether a value obeys the schema."""
        return bool(self._validator.is_valid(value))


def _invalid(rule: str) -> PlanError:
    return PlanError("schema_invalid", f"json_schema must {rule}", field="json_schema")


def _place(error: Exception) -> str:
    """Where in the schema the error is, as far as it is known."""
    path = error.instance_path if isinstance(error, jsonschema_rs.ValidationError) else []
    return f" at {visible(cut('.'.join(map(str, path))))}" if path else ""


def passes(schema: JsonSchema, most: int) -> int:
    """Count the subschemas of a schema with every $ref written out, up to little more than `most`,
    in a time that grows with `most` only.

    The validator remembers what it found by a schema inside itself for each object and list, but
    not for other values and empty ones. So inside itself a schema is written out only as far as it
    describes the same value. In which order the validator follows definitions that contain each
    other is its own affair: counted are all ways from the top on which none repeats, which include
    those that it takes.
    """
    costs = {at: _cost(schema, at) for at in schema.subschemas}
    count, around = 0, set[tuple[str, bool]]()
    left = [("#", False, False)]  # a list, since chains of $ref may be very long
    while left and count <= most:
        at, again, done = left.pop()
        if done:
            around.remove((at, again))
            continue
        again |= (at, again) in around
        if (at, again) in around:
            count += 1
            continue
        around.add((at, again))
        left.append((at, again, True))
        count += costs[at]
        for inner, same in _directly_inside(schema, at):
            if same or not again:
                left.append((inner, again, False))
    return count


def _directly_inside(schema: JsonSchema, at: str) -> list[tuple[str, bool]]:
    """The subschemas passed with one, and whether they describe the same value; not booleans."""
    here = schema.subschemas[at]
    found = [(inner, key in SAME_VALUE) for key, inner in here.inner if key not in DEFINITIONS]
    if here.ref is not None:
        found.append((here.ref, True))
    return [(inner, same) for inner, same in found if not schema.subschemas[inner].boolean]


def _cost(schema: JsonSchema, at: str) -> int:
    """How many passes a subschema counts for: itself, each subschema that is true or false, and
    each value of its literals that is compared one by one.
    """
    here = schema.subschemas[at]
    inner = [one for key, one in here.inner if key not in DEFINITIONS]
    inner += [] if here.ref is None else [here.ref]
    booleans = sum(schema.subschemas[one].boolean for one in inner)
    return 1 + booleans + sum(_literals(here.table[key]) for key in here.table.keys() & _LITERALS)


_LITERALS = frozenset(("const", "enum"))


def _literals(value: object) -> int:
    left = list(cast("list[object]", value)) if isinstance(value, list) else [value]
    if all(type(one) is int for one in left):
        return 1  # looked up at once, as strings are; others are compared one by one
    count = 0
    while left:
        node = left.pop()
        count += not isinstance(node, str)
        if isinstance(node, Mapping):
            left += cast("Mapping[str, object]", node).values()
        elif isinstance(node, list):
            left += cast("list[object]", node)
    return count
