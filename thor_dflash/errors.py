"""Every error thor-dflash raises on purpose.

Message form: `<what> must be <rule> (got <value>)`, naming the field, file or tensor. The command
line prints one line and exits 2; nothing else leaves a floor.
"""

from __future__ import annotations

from typing import Literal

Code = Literal[
    "bad_request", "unsupported_version", "unauthorized", "too_large", "prompt_too_long",
    "schema_invalid", "schema_unsupported", "busy", "deadline_infeasible", "deadline",
    "cancelled", "preempted", "stale", "not_ready", "draining",
    "engine_fault", "internal", "unreachable",
]  # fmt: skip
"""Why a plan was refused, on the wire; `unreachable` is what a client says of a silent server."""

RETRYABLE: frozenset[Code] = frozenset({"busy", "not_ready", "engine_fault", "unreachable"})
"""The same request may succeed later, unchanged."""


class ThorError(Exception):
    """Root of the tree."""


class ConfigError(ThorError):
    """An option, a TOML file or a --set does not describe a configuration."""


class CheckpointError(ThorError):
    """A checkpoint directory is not what its config says, or is not understood."""


class PackageError(ThorError):
    """A package directory is damaged, of another version, or does not fit this machine."""


class EngineError(ThorError):
    """A graph, a binding or the device refused."""


class NoRoom(EngineError):
    """What is to be loaded does not fit in memory. Nothing was allocated."""

    def __init__(self, text: str, lacks: int) -> None:
        super().__init__(text)
        self.lacks = lacks
        """Bytes."""


class EngineLost(EngineError):
    """The device answers nothing else in this process; a new one may start again."""


class TransactionError(ThorError):
    """A step used out of order. Always a bug in the caller."""


class RequestError(ThorError):
    """A request this session cannot serve. Nothing was decoded."""


class ModelFault(ThorError):
    """The model produced no usable token (NaN, infinity, or nothing left to choose)."""


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
        retryable: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.code: Code = code
        self.message = message
        self.field = field
        """The request's field that is at fault."""
        self.retry_after_ms = retry_after_ms
        self.min_ms = min_ms
        """Least deadline that could be met, ms."""
        self.retryable = code in RETRYABLE if retryable is None else retryable
        """Whether the same request may succeed later; where it is not said, the code says it."""
