"""From a robot's skills (`tdp.skills.v1`) to the schema of its plans."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, cast

from msgspec import structs

from thor_dflash.core.errors import PlanError, RequestError
from thor_dflash.core.message_text import show
from thor_dflash.serving.planner.plan_schema import Kind, Schema, from_skills
from thor_dflash.serving.protocol import messages
from thor_dflash.serving.protocol.codec import convert
from thor_dflash.serving.protocol.errors import refusal
from thor_dflash.serving.protocol.skills import Skill, SkillArgument, SkillSet

FIELDS = {
    "number": {"min", "max", "unit"},
    "integer": {"min", "max"},
    "boolean": set[str](),
    "text": {"max_chars"},
    "choice": {"values"},
}
"""Type of an argument -> the fields that it needs."""
MAX_ALTERNATIVES = 4096
"""Most skills, over all steps: more would take seconds, and make a schema that is too long."""
OPTIONAL = {"integer": {"unit"}}
R = TypeVar("R", messages.PlanRequest, messages.Validate)


def schema_of(given: SkillSet) -> Schema:
    """Return the schema of plans over these skills.

    Raises:
        RequestError: naming the skill and the argument.
    """
    alternatives = len(given.skills) * (given.max_steps if given.numbered else 1)
    if alternatives > MAX_ALTERNATIVES:
        rule = f"skills times max_steps, with numbered true, must be <= {MAX_ALTERNATIVES}"
        raise RequestError(f"{rule} (got {alternatives})")
    ids = {name: list(values) for name, values in given.ids.items()}
    if given.poses:
        if "pose" in ids:
            raise RequestError("ids.pose must be left out where there are poses (got both)")
        ids["pose"] = list(given.poses)
    for name, values in ids.items():
        if len({*values}) < len(values):
            raise RequestError(f"ids.{name} must have every id once (got {show(values)})")
    skills: dict[str, dict[str, Kind]] = {
        skill: {
            name: _kind(f"skills.{skill}.args.{name}", argument)
            for name, argument in its.args.items()
        }
        for skill, its in given.skills.items()
    }
    return from_skills(skills, ids, max_steps=given.max_steps, numbered=given.numbered)


def _kind(where: str, argument: str | SkillArgument) -> Kind:
    if isinstance(argument, str):
        return argument
    table = structs.asdict(argument)
    have = {name for name, value in table.items() if name != "type" and value is not None}
    need = FIELDS[argument.type]
    if not need <= have <= need | OPTIONAL.get(argument.type, set()):
        rule = ", ".join(sorted(need)) or "no further field"
        raise RequestError(
            f"{where} must have {rule}, as its type is {argument.type} "
            f"(got {', '.join(sorted(have)) or 'none'})"
        )
    return {
        "number": _number,
        "integer": _number,
        "boolean": _boolean,
        "text": _text,
        "choice": _choice,
    }[argument.type](where, argument)


def _boolean(where: str, argument: SkillArgument) -> Kind:
    del where, argument  # nothing can be wrong
    return {"type": "boolean"}


def _number(where: str, argument: SkillArgument) -> Schema:
    low, high = argument.min, argument.max
    assert low is not None, "a field that it needs"
    assert high is not None, "a field that it needs"
    if low > high:
        raise RequestError(f"{where} must have min <= max (got {low:g} and {high:g})")
    if argument.type == "integer":
        if low % 1 or high % 1:
            raise RequestError(f"{where} must have whole min and max (got {low:g} and {high:g})")
        low, high = int(low), int(high)
    unit = {"description": argument.unit} if argument.unit else {}
    return {"type": argument.type, "minimum": low, "maximum": high, **unit}


def _text(where: str, argument: SkillArgument) -> Schema:
    return {"type": "string", "minLength": 1, "maxLength": argument.max_chars}


def _choice(where: str, argument: SkillArgument) -> Schema:
    if not argument.values:
        raise RequestError(f"{where} must have values (got none)")
    return {"enum": list(argument.values)}


def read(table: Mapping[str, Any]) -> SkillSet:
    """Return the skills in a table, as a file has it.

    Raises:
        RequestError: naming the field.
    """
    where = ""
    try:
        for skill, its in _items(table.get("skills")):
            for name, argument in _items(dict(_items(its)).get("args")):
                where = f"skills.{skill}.args.{name}."  # msgspec names no keys of a table
                if isinstance(argument, dict):
                    convert(cast("dict[str, Any]", argument), SkillArgument)
            where = f"skills.{skill}."
            convert(dict(_items(its)), Skill)
        where = ""
        return convert(dict(table), SkillSet)
    except PlanError as e:
        raise RequestError(where + e.message) from e


def _items(value: object) -> Iterable[tuple[str, Any]]:
    """The items of a table; none of anything else, which the types refuse afterwards."""
    return cast("dict[str, Any]", value).items() if isinstance(value, dict) else ()


def with_schema(request: R) -> R:
    """Return a request with the schema of its skills in their place.

    Raises:
        PlanError: bad_request, naming the field.
    """
    if request.skills is None:
        return request
    try:
        return structs.replace(request, skills=None, json_schema=schema_of(request.skills))
    except RequestError as e:
        raise PlanError("bad_request", refusal(e), field="skills") from e
