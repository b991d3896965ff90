"""A second opinion on a plan: JSON Schema, checked apart from the grammar that produced it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import jsonschema_rs

from thor_dflash.errors import PlanError


def _offline(uri: str) -> NoReturn:
    raise ValueError(f"a schema must hold all it refers to (got {uri})")


class Checker:
    """A schema, ready to judge. Reaches no network, whatever the schema refers to."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        """Take a schema.

        Raises:
            PlanError: schema_invalid.
        """
        try:
            self._validator: Any = jsonschema_rs.validator_for(dict(schema), retriever=_offline)
        except (ValueError, jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError) as e:
            text = str(e).splitlines()[0][:200]
            raise PlanError(
                "schema_invalid", f"json_schema must be a JSON Schema (got: {text})",
                field="json_schema",
            ) from e  # fmt: skip

    def valid(self, value: object) -> bool:
        """Whether a value obeys the schema."""
        return bool(self._validator.is_valid(value))
