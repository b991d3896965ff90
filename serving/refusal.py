"""Why a request was not served, as a code of the protocol."""

from __future__ import annotations

from typing import Literal

from thor_dflash.errors import ThorError

Code = Literal[
    "bad_request", "unsupported_version", "unauthorized", "too_large", "prompt_too_long",
    "schema_invalid", "schema_unsupported", "busy", "deadline_infeasible", "deadline",
    "cancelled", "preempted", "stale", "not_ready", "draining",
    "engine_fault", "internal", "unreachable",
]  # fmt: skip
"""Codes on the wire; `unreachable` is said by a client whose server does not answer."""

RETRYABLE: frozenset[Code] = frozenset({"busy", "not_ready", "engine_fault", "unreachable"})
"""The same request may succeed later, unchanged."""


class PlanError(ThorError):
    """A request that a planner refused or could not finish."""

    def __init__(
        self,
        code: Code,
        message: str,
        *,
        field: str | None = None,
        retry_after_ms: float | None = None,
        min_ms: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code: Code = code
        self.message = message
        self.field = field
        """The request's field that is at fault."""
        self.retry_after_ms = retry_after_ms
        self.min_ms = min_ms
        """Least deadline that could be met, ms."""

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed later."""
        return self.code in RETRYABLE
