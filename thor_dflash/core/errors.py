"""All error classes of thor-dflash.

Message form: `<what> must be <rule> (got <value>)`, naming the field, file or tensor. The command
line prints one line and exits with 2. Any other exception that escapes is a bug.
"""

from __future__ import annotations

from typing import Literal

Code = Literal[
    "bad_request", "unsupported_version", "unauthorized", "too_large", "prompt_too_long",
    "schema_invalid", "schema_unsupported", "busy", "deadline_infeasible", "deadline",
    "cancelled", "preempted", "stale", "not_ready", "draining",
    "engine_fault", "internal", "unreachable",
]  # fmt: skip
"""Why a plan was refused, on the wire; `unreachable` is set by a client if a server is silent."""

RETRYABLE: frozenset[Code] = frozenset({"busy", "not_ready", "engine_fault", "unreachable"})
"""Codes with which the same request may succeed later."""


class ThorError(Exception):
    """Base class of all errors of thor-dflash."""


class ConfigError(ThorError):
    """An option, a TOML file or a --set does not describe a configuration."""


class CheckpointError(ThorError):
    """A checkpoint directory contradicts its config, or is not supported."""


class PackageError(ThorError):
    """A package directory is damaged, of another version, or does not fit this machine."""


class EngineError(ThorError):
    """An engine, a graph or the device cannot do what is requested."""


class OutOfMemory(EngineError):
    """The package does not fit in memory. Nothing was allocated."""

    def __init__(self, text: str, lacks: int) -> None:
        super().__init__(text)
        self.lacks = lacks
        """Bytes missing."""


class EngineLost(EngineError):
    """The device cannot be used again in this process, but may work in a new one."""


class TransactionError(ThorError):
    """A step used out of order. Always a bug in the caller."""


class RequestError(ThorError):
    """A request this session cannot serve. Nothing was decoded."""

    def __init__(self, text: str, field: str | None = None) -> None:
        super().__init__(text)
        self.field = field
        """The field at fault, where the caller is to find it in a larger request."""


class CompilerBusy(RequestError):
    """Another schema is still being compiled. The same request may succeed later."""


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
        min_ms: int | None = None,
        retryable: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.code: Code = code
        self.message = message
        self.field = field
        """The field of the request that is at fault."""
        self.retry_after_ms = retry_after_ms
        self.min_ms = min_ms
        """Shortest deadline that could be met, ms: a `deadline_ms` for another try."""
        self.retryable = code in RETRYABLE if retryable is None else retryable
        """Whether the same request may succeed later; by default decided by the code."""

    def __repr__(self) -> str:
        names = ("field", "retry_after_ms", "min_ms")
        details = {name: value for name in names if (value := vars(self)[name]) is not None}
        given = "".join(f", {name}={value!r}" for name, value in details.items())
        return f"PlanError({self.code!r}, {self.message!r}{given})"
