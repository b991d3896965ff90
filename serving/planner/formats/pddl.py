"""Plans as lines of PDDL: `(pick cup)`, the arguments in the order of the skills."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from thor_dflash.core.errors import RequestError
from thor_dflash.core.message_text import show
from thor_dflash.serving.planner.formats.text_format import (
    ArgumentRules,
    TextPlanFormat,
    literal,
    schema_of,
)
from thor_dflash.serving.planner.plan_format import Step
from thor_dflash.serving.planner.skill_schema import Abilities

_NAME = re.compile("[a-z][a-z0-9_-]*")
"""PDDL does not distinguish upper from lower case."""
_LINE = re.compile(r"\(([^()\s]+(?: [^()\s]+)*)\)\n")


class PddlPlan(TextPlanFormat):
    """See TextPlanFormat. A piece is a line."""

    name = "pddl_plan"
    end = "\n"

    def __init__(self, able: Abilities) -> None:
        super().__init__(able)
        for skill, args in able.skills.items():
            _check_name(f"skills.{skill}", skill)
            for name, kind in args.items():
                where = f"skills.{skill}.args.{name}"
                schema = schema_of(kind, able)
                if "enum" not in schema:
                    rule = "be a set of ids or a choice, as PDDL has objects only"
                    raise RequestError(
                        f"{where} must {rule}, for plan_format pddl_plan (got {schema['type']})"
                    )
                for word in schema["enum"]:
                    _check_name(where, word)

    def lark(self) -> str:
        """See TextPlanFormat."""
        rules, steps = ArgumentRules(self.able, str), list[str]()
        for skill, args in self.able.skills.items():
            words = "".join(f' " " {rules.of(kind)}' for kind in args.values())
            steps.append(
                f"step{len(steps)}: {literal(f'({skill}')}{words} {literal(')' + self.end)}"
            )
        names = " | ".join(f"step{i}" for i in range(len(steps)))
        return "\n".join(
            [
                "%llguidance {}",
                f"start: step{{1,{self.able.max_steps}}}",
                f"step: {names}",
                *steps,
                *rules.lines,
            ]
        )

    def write(self, steps: Iterable[Step]) -> str:
        """See TextPlanFormat."""
        lines = (" ".join([step["skill"], *step["args"].values()]) for step in steps)
        return "".join(f"({line})\n" for line in lines)

    def read(self, text: str, *, whole: bool) -> tuple[dict[str, object] | None, bool]:
        """See PlanFormat. The last line may have lost its end."""
        found = super().read(text.removesuffix(self.end) + self.end, whole=True)
        return found if whole or found[1] else super().read(self.close(text), whole=True)

    def close(self, text: str) -> str:
        """See TextPlanFormat."""
        return text[: text.rfind(self.end) + 1]

    def _pieces(self, text: str) -> Iterable[str]:
        lines = text.removesuffix(self.end).split(self.end)
        if len(lines) > self.able.max_steps:
            raise ValueError(f"a plan must have <= {self.able.max_steps} steps (got {len(lines)})")
        return [line + self.end for line in lines]

    def _parse(self, piece: str) -> tuple[str, Mapping[str, Any]] | None:
        if (found := _LINE.fullmatch(piece)) is None:
            raise ValueError(f"a line must be an action in brackets (got {piece})")
        skill, *words = found[1].split(" ")
        names = self.able.skills.get(skill, {})
        return skill, dict(zip(names, words, strict=True))


def _check_name(where: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        rule = "be a name of PDDL in lower case, [a-z][a-z0-9_-]*"
        raise RequestError(f"{where} must {rule}, for plan_format pddl_plan (got {show(name)})")
