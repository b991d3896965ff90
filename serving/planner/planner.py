"""The planner interface: a request (ask) in, a plan out. Local sessions and servers share it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Protocol, Self

from msgspec import structs

from thor_dflash.core.errors import PlanError, ThorError
from thor_dflash.serving.planner.backend import (
    Backend,
    Prepared,
    StopReason,
    deadline_of,
    drive,
    left_ms,
)
from thor_dflash.serving.planner.latency_model import TRIAL, LatencyModel
from thor_dflash.serving.planner.result import requested_parts
from thor_dflash.serving.protocol import messages, validation

RETRY_MS = 10.0
"""How much longer the checks of another try may take than those of the one that was refused."""


class Planner(Protocol):
    """Answers one ask at a time."""

    def plan(self, ask: messages.PlanRequest) -> messages.Result:
        """Answer an ask with its result.

        Raises:
            PlanError: it was refused or could not be finished.
        """
        ...

    def stream(self, ask: messages.PlanRequest) -> Iterator[messages.Event]:
        """Answer an ask piece by piece; the last event is the result. Close it to cancel.

        Raises:
            PlanError: while iterating, as `plan`.
        """
        ...

    def close(self) -> None:
        """Release all resources. Idempotent."""
        ...


class LocalPlanner:
    """A backend without a server."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def plan(self, ask: messages.PlanRequest) -> messages.Result:
        for event in self.stream(structs.replace(ask, stream=False)):
            if isinstance(event, messages.Result):
                return event
        raise AssertionError("a stream ends with its result")

    def stream(self, ask: messages.PlanRequest) -> Iterator[messages.Event]:
        validation.check(ask)
        begun = time.monotonic()
        deadline = deadline_of(ask, begun)
        prepared = self._backend.prepare(ask, left_ms(deadline))
        spent_ms = 1e3 * (time.monotonic() - begun)
        check_deadline(prepared.min_ms, left_ms(deadline), self._backend.rates, spent_ms=spent_ms)
        return self._events(prepared, deadline)

    def _events(self, prepared: Prepared, deadline: float | None) -> Iterator[messages.Event]:
        ask = prepared.ask
        # Started here: closing an iterator that was never asked for an event runs none of this.
        run = self._backend.start(prepared, left_ms(deadline))
        try:
            with closing(drive(run, deadline)) as events:
                for seq, event in enumerate(events):
                    numbered = structs.replace(event, id=ask.id, seq=seq)
                    if isinstance(numbered, messages.Result):
                        numbered = requested_parts(final(numbered, ask), ask)
                    yield numbered
        except PlanError:
            raise
        except ThorError as e:
            raise PlanError("engine_fault", str(e)) from e

    def close(self) -> None:
        self._backend.close()


def check_deadline(
    min_ms: float, left_ms: float | None, rates: LatencyModel, *, spent_ms: float, free: bool = True
) -> None:
    """Refuse at once what cannot be done in time: an early refusal is of more use to a robot.

    `min_ms` is what the plan needs from now on; `spent_ms` is what its checks have taken.

    Only new steps can show that a slow machine is fast again. So if the engine is free, the
    TRIAL-th refusal in a row, without a step in between, is admitted as a trial instead.

    Raises:
        PlanError: deadline_infeasible, with the shortest deadline that could be met.
    """
    if left_ms is None or left_ms >= min_ms:
        return
    rates.refused += 1
    if free and left_ms > 0 and rates.refused >= TRIAL:
        return
    # Rounded away from each other: rounded to the nearest, both could be the same number.
    least, got = math.ceil(min_ms), max(0, math.floor(left_ms))
    raise PlanError(
        "deadline_infeasible",
        f"deadline_ms must leave at least {least} ms for the plan (got {got} ms left)",
        field="deadline_ms",
        min_ms=math.ceil(min_ms + spent_ms + RETRY_MS),
    )


def final(result: messages.Result, ask: messages.PlanRequest) -> messages.Result:
    """Return the result, unless the way it ended is an error for this ask.

    Raises:
        PlanError: cancelled, preempted, or past the deadline with on_deadline "error".
    """
    why: StopReason
    if result.finish_reason == "cancelled" or result.finish_reason == "preempted":
        why = result.finish_reason
    elif result.finish_reason == "deadline" and ask.on_deadline == "error":
        why = "deadline"
    else:
        return result
    raise stop_error(why)


def stop_error(why: StopReason) -> PlanError:
    """Return the error that reports an early end."""
    words = {
        "cancelled": "the plan was cancelled",
        "preempted": "a later or more urgent plan took its place",
        "deadline": "the deadline passed before there was a plan",
    }
    return PlanError(why, words[why])
