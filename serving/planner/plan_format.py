"""How an answer is read as a plan: JSON under a schema, or one of the formats in `formats/`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from thor_dflash.serving.planner.partial_json import StepStream, close_partial, read_object
from thor_dflash.serving.planner.schema_validator import SchemaValidator

Step = dict[str, Any]
"""One step of a plan, as a client gets it."""


class StepReader(Protocol):
    """Takes an answer piece by piece and returns each step once it is complete."""

    def feed(self, text: str) -> list[Step]:
        """Return the steps that this text completes, in order."""
        ...


class PlanFormat(Protocol):
    """Reads answers, independently of the grammar that produced them."""

    @property
    def demanded(self) -> bool:
        """Whether an answer that is no such plan is an error."""
        ...

    def reader(self) -> StepReader:
        """Return a reader for one answer."""
        ...

    def read(self, text: str, *, whole: bool) -> tuple[dict[str, object] | None, bool]:
        """Return the plan in an answer, None if there is none, and whether it is valid. An answer
        that is not `whole` is cut back to its last complete step and closed.
        """
        ...


@dataclass(frozen=True, slots=True)
class JsonPlan:
    """See PlanFormat: one JSON object, valid under its schema if it has one."""

    checker: SchemaValidator | None = None

    @property
    def demanded(self) -> bool:
        """See PlanFormat: without a schema an answer may be a text."""
        return self.checker is not None

    def reader(self) -> StepReader:
        """See PlanFormat."""
        return StepStream()

    def read(self, text: str, *, whole: bool) -> tuple[dict[str, object] | None, bool]:
        """See PlanFormat."""
        plan = read_object(text)
        if plan is None and not whole:
            closed = close_partial(text, self._valid)
            plan = None if closed is None else read_object(closed)
        return plan, plan is not None and self._valid(plan)

    def _valid(self, plan: dict[str, object]) -> bool:
        return self.checker is None or self.checker.valid(plan)
