"""Validates a plan against its JSON Schema, independently of the grammar that produced it."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any, NoReturn, cast

import jsonschema_rs

from thor_dflash.errors import PlanError
from thor_dflash.records import cut, visible

MOST_PATTERNS = 64
"""Most regular expressions in a schema. Compiling one blocks the whole interpreter, so the server
answers nobody meanwhile."""
PATTERN_BYTES = 1 << 20
"""Largest compiled pattern: some 800 repetitions of any character, compiled in 5 ms."""


def _offline(uri: str) -> NoReturn:
    raise ValueError(f"a schema must hold all it refers to (got {uri})")


class Checker:
    """A compiled schema. Never uses the network, whatever the schema refers to."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        """Compile a schema.

        Raises:
            PlanError: schema_invalid.
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
