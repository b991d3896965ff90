"""The exit status of the commands."""

from __future__ import annotations

from collections.abc import Mapping

from thor_dflash.core.errors import Code, PlanError, ThorError

OK = 0
WRONG = 1
"""`doctor`, `check` or `quality` found a fault; the answer of `plan` holds no valid plan."""
USAGE = 2
"""An error that the user can fix."""
PARTIAL = 3
"""`plan` was cut short: what it prints are the whole steps so far."""
UNREACHABLE = 4
"""No plan server answered."""
NOT_NOW = 5
"""The plan server answered without a plan, through no fault of the request."""
INTERRUPTED = 130
PIPE_CLOSED = 141

_PLAN: Mapping[Code, int] = {
    "unreachable": UNREACHABLE,
    **dict.fromkeys(
        (
            "busy", "not_ready", "draining", "deadline", "deadline_infeasible", "cancelled",
            "preempted", "stale", "engine_fault", "internal",
        ),
        NOT_NOW,
    ),
}  # fmt: skip
"""Other codes blame the request."""


def of_error(error: ThorError) -> int:
    """The exit status of an error that ends a command."""
    return _PLAN.get(error.code, USAGE) if isinstance(error, PlanError) else USAGE
