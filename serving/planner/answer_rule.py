"""What a request demands of its answer: a schema, plans of its skills in a format, or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from thor_dflash.core.errors import PlanError, RequestError
from thor_dflash.core.message_text import cut, visible
from thor_dflash.runtime.grammar.schema import JsonSchema
from thor_dflash.serving.planner.formats.bt_cpp import BehaviorTreeXml
from thor_dflash.serving.planner.formats.nav2 import Nav2Waypoints
from thor_dflash.serving.planner.formats.pddl import PddlPlan
from thor_dflash.serving.planner.formats.text_format import TextPlanFormat
from thor_dflash.serving.planner.plan_format import JsonPlan, PlanFormat
from thor_dflash.serving.planner.schema_validator import SchemaValidator, read_schema
from thor_dflash.serving.planner.skill_schema import abilities, schema_of
from thor_dflash.serving.protocol import messages, validation
from thor_dflash.serving.protocol.errors import refusal
from thor_dflash.serving.protocol.skills import PlanFormatName, SkillSet

TEXT_FORMATS: dict[str, type[TextPlanFormat]] = {
    form.name: form for form in (BehaviorTreeXml, PddlPlan)
}
FEATURES = tuple(f"plan_format:{name}" for name in (*TEXT_FORMATS, Nav2Waypoints.name))
"""Words of `hello`."""


@dataclass(frozen=True, slots=True)
class AnswerRule:
    """What is enforced while an answer is decoded, and how it is read afterwards."""

    format: PlanFormat
    field: str = ""
    """The field of the request that demands it."""
    schema: JsonSchema | None = None
    lark: str = ""
    """A grammar instead of a schema; empty: none."""
    warnings: tuple[str, ...] = ()
    """What can grow in an answer under `lark`; of a schema its grammar says it."""


def rule_of(request: messages.PlanRequest | messages.Validate) -> AnswerRule:
    """Return what a request demands.

    Raises:
        PlanError: naming the field, and of skills the skill and its argument.
    """
    if request.skills is not None:
        return _rule_of_skills(request.skills, request.plan_format)
    if isinstance(request, messages.Validate):
        given: Mapping[str, Any] | None = request.json_schema
    else:
        given = validation.schema_of(request)
    if given is None:
        return AnswerRule(JsonPlan())
    schema = read_schema(given)
    return AnswerRule(JsonPlan(SchemaValidator(schema)), "json_schema", schema)


def _rule_of_skills(skills: SkillSet, name: PlanFormatName) -> AnswerRule:
    try:
        if name in TEXT_FORMATS:
            form = TEXT_FORMATS[name](abilities(skills))
            return AnswerRule(form, "skills", lark=form.lark(), warnings=form.warnings())
        waypoints = Nav2Waypoints(skills) if name == "nav2_waypoints" else None
        schema = read_schema(schema_of(skills) if waypoints is None else waypoints.schema)
        return AnswerRule(waypoints or JsonPlan(SchemaValidator(schema)), "skills", schema)
    except RequestError as e:
        # Its first words are where in the skills it is.
        where = cut(visible(str(e).partition(" must ")[0]))
        raise PlanError("bad_request", f"skills.{refusal(e)}", field=f"skills.{where}") from e
    except PlanError as e:  # of the schema that was made
        message = e.message.replace("json_schema", "the schema of skills", 1)
        raise PlanError(e.code, message, field="skills") from e
