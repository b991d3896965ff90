"""What the formats that are no JSON share: steps in pieces of text, and the rules of arguments."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from thor_dflash.serving.planner.plan_format import Step, StepReader
from thor_dflash.serving.planner.plan_schema import Kind, steps_schema
from thor_dflash.serving.planner.schema_validator import SchemaValidator, read_schema
from thor_dflash.serving.planner.skill_schema import Abilities

COMPACT = {"whitespace_flexible": False}


class TextPlanFormat(ABC):
    """A plan as text, in which each step is one piece with the character `end` at its end. Errors
    of a text are ValueError.
    """

    name: str
    end: str

    def __init__(self, able: Abilities) -> None:
        """Take what the robot can do.

        Raises:
            RequestError: something in it has no form in this format; names the skill and argument.
            PlanError: the schema of the steps is too large.
        """
        self.able = able
        steps = steps_schema(able.skills, able.ids, 1)
        self._checker = SchemaValidator(read_schema(steps))

    @abstractmethod
    def lark(self) -> str:
        """Return the grammar, as text for llguidance."""

    @abstractmethod
    def write(self, steps: Iterable[Step]) -> str:
        """Return a plan with these steps, one after another."""

    @abstractmethod
    def close(self, text: str) -> str:
        """Return a text cut after its last complete step, with its ends added."""

    @abstractmethod
    def _pieces(self, text: str) -> Iterable[str]:
        """The pieces of a complete plan that are steps, in order. Raises ValueError."""

    @abstractmethod
    def _parse(self, piece: str) -> tuple[str, Mapping[str, Any]] | None:
        """The skill of a piece and its arguments; None if it is no step. Raises ValueError."""

    @property
    def demanded(self) -> bool:
        """See PlanFormat."""
        return True

    def reader(self) -> StepReader:
        """See PlanFormat."""
        return _PieceReader(self.end, self.step)

    def step(self, piece: str, number: int) -> Step | None:
        """Return the step in a piece; None if it is none.

        Raises:
            ValueError: it is not one of the robot's.
        """
        if (found := self._parse(piece)) is None:
            return None
        step = {"id": number, "skill": found[0], "args": dict(found[1])}
        if not self._checker.valid([step]):
            raise ValueError(f"a step must be one of the robot's (got {piece})")
        return step

    def read(self, text: str, *, whole: bool) -> tuple[dict[str, object] | None, bool]:
        """See PlanFormat."""
        for body in (text,) if whole else (text, self.close(text)):
            try:
                pieces = self._pieces(body)
                steps = [step for n, p in enumerate(pieces, 1) if (step := self.step(p, n))]
            except ValueError:
                continue
            return {"format": self.name, "body": body, "steps": steps}, True
        return None, False

    def warnings(self) -> tuple[str, ...]:
        """Return what lets an answer grow without end, as JsonSchema.warnings does."""
        return tuple(
            f"skills.{skill}.args.{name} must be an integer or a choice "
            "(got a number with any count of digits)"
            for skill, args in self.able.skills.items()
            for name, kind in args.items()
            if schema_of(kind, self.able).get("type") == "number"
        )

    def sample(self) -> str:
        """Return a plan of up to three skills, for a server without a model."""
        chosen = list(self.able.skills.items())[: min(3, self.able.max_steps)]
        return self.write(
            {"id": n, "skill": skill, "args": {a: example(k, self.able) for a, k in args.items()}}
            for n, (skill, args) in enumerate(chosen, 1)
        )


@dataclass(slots=True)
class _PieceReader:
    """See StepReader."""

    _end: str
    _step: Callable[[str, int], Step | None]
    _tail: str = ""
    _count: int = 0
    _dead: bool = False

    def feed(self, text: str) -> list[Step]:
        steps: list[Step] = []
        *pieces, self._tail = (self._tail + text).split(self._end)
        for piece in pieces if not self._dead else ():
            try:
                step = self._step(piece + self._end, self._count + 1)
            except ValueError:
                self._dead = True
                break
            if step is not None:
                self._count += 1
                steps.append(step)
        return steps


@dataclass(slots=True)
class ArgumentRules:
    """The Lark rules of arguments. Equal kinds share one; words are terminals, since a rule of
    10,000 alternatives is more than the parser holds.
    """

    able: Abilities
    escape: Callable[[str], str]
    """A word as the format writes it."""
    text: str = ""
    """Regular expression of one character of free text."""
    lines: list[str] = field(default_factory=list[str])
    _named: dict[str, str] = field(default_factory=dict[str, str])

    def of(self, kind: Kind) -> str:
        """Return the name of a kind's rule."""
        key = json.dumps(kind)
        if key not in self._named:
            number = len(self._named)
            schema = schema_of(kind, self.able)
            if schema.get("type") in ("number", "integer"):
                self._named[key] = f"number{number}"
                rule = "%json " + json.dumps({**schema, "x-guidance": COMPACT})
            else:
                self._named[key] = f"WORD{number}"
                rule = self._words(schema)
            self.lines.append(f"{self._named[key]}: {rule}")
        return self._named[key]

    def _words(self, schema: Mapping[str, Any]) -> str:
        if schema.get("type") == "string":
            return f"/{self.text}{{{schema['minLength']},{schema['maxLength']}}}/"
        words = ("true", "false") if schema.get("type") == "boolean" else schema["enum"]
        return " | ".join(literal(self.escape(word)) for word in words)


def schema_of(kind: Kind, able: Abilities) -> Mapping[str, Any]:
    """Return the schema of a kind of argument."""
    return {"enum": list(able.ids[kind])} if isinstance(kind, str) else kind


def literal(text: str) -> str:
    """Return a text as Lark writes it."""
    return json.dumps(text, ensure_ascii=False)


def value(kind: Kind, text: str) -> object:
    """Return the value that stands as `text`; the checker looks whether it is allowed.

    Raises:
        ValueError: it is none of the type.
    """
    type = None if isinstance(kind, str) else kind.get("type")
    if type not in ("number", "integer", "boolean"):
        return text
    try:
        return msgspec.json.decode(text, type=bool if type == "boolean" else int | float)
    except msgspec.DecodeError as e:
        raise ValueError(f"an argument must be a {type} (got {text})") from e


def example(kind: Kind, able: Abilities) -> object:
    """Return some value that a kind of argument allows."""
    schema = schema_of(kind, able)
    if "enum" in schema:
        return schema["enum"][0]
    if schema["type"] in ("number", "integer"):
        return min(max(0, schema["minimum"]), schema["maximum"])
    return True if schema["type"] == "boolean" else "mock"[: schema["maxLength"]]
