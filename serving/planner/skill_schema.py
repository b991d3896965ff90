"""From a robot's skills (`tdp.skills.v1`) to what its plans may hold, and their schema."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec import structs

from thor_dflash.core.errors import RequestError
from thor_dflash.core.message_text import check_utf8, show
from thor_dflash.runtime.grammar.schema import MAX_BOUND
from thor_dflash.serving.planner.plan_schema import Kind, Schema, from_skills, possible
from thor_dflash.serving.protocol.skills import SkillArgument, SkillSet

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
MAX_NAME = 256
"""Most characters of a name, an id or a word."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a robot can do now."""

    skills: Mapping[str, Mapping[str, Kind]]
    """Possible skill -> argument, in the order written -> set of ids, or schema."""
    ids: Mapping[str, Sequence[str]]
    max_steps: int


def abilities(given: SkillSet) -> Abilities:
    """Return what these skills make possible.

    Raises:
        RequestError: as `schema_of`.
    """
    if len(given.skills) > MAX_ALTERNATIVES:
        raise RequestError(f"skills must be <= {MAX_ALTERNATIVES} (got {len(given.skills)})")
    ids, kinds = ids_of(given), _kinds(given)
    return Abilities(possible(kinds, ids), ids, given.max_steps)


def schema_of(given: SkillSet) -> Schema:
    """Return the schema of plans over these skills.

    Raises:
        RequestError: naming the skill and the argument.
    """
    alternatives = len(given.skills) * (given.max_steps if given.numbered else 1)
    if alternatives > MAX_ALTERNATIVES:
        rule = f"skills must be <= {MAX_ALTERNATIVES}, times max_steps where numbered is true"
        raise RequestError(f"{rule} (got {alternatives})")
    kinds, ids = _kinds(given), ids_of(given)
    return from_skills(kinds, ids, max_steps=given.max_steps, numbered=given.numbered)


def ids_of(given: SkillSet) -> dict[str, Sequence[str]]:
    """Return the sets of ids, with the one of the poses.

    Raises:
        RequestError: naming the set.
    """
    ids: dict[str, Sequence[str]] = {**given.ids}
    if given.poses:
        if "pose" in ids:
            raise RequestError("ids.pose must be left out where there are poses (got both)")
        ids["pose"] = tuple(given.poses)
    for name, values in ids.items():
        _check_names(f"ids.{name}", values)
        if len({*values}) < len(values):
            raise RequestError(f"ids.{name} must have every id once (got {show(list(values))})")
    return ids


def _kinds(given: SkillSet) -> dict[str, dict[str, Kind]]:
    _check_names("skills", given.skills)
    for skill, its in given.skills.items():
        _check_names(f"skills.{skill}.args", its.args)
    return {
        skill: {
            name: _kind(f"skills.{skill}.args.{name}", argument)
            for name, argument in its.args.items()
        }
        for skill, its in given.skills.items()
    }


def _check_names(where: str, names: Iterable[str]) -> None:
    for name in names:
        check_utf8(where, name)
        if not 1 <= len(name) <= MAX_NAME or any(c < " " or c == "\x7f" for c in name):
            rule = f"names of 1 to {MAX_NAME} characters, none of them a control"
            raise RequestError(f"{where} must have {rule} (got {show(name)})")


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
    check_range(where, low, high, MAX_BOUND[int if argument.type == "integer" else float])
    if argument.type == "integer":
        if low % 1 or high % 1:
            raise RequestError(f"{where} must have whole min and max (got {low:g} and {high:g})")
        low, high = int(low), int(high)
    unit = {"description": argument.unit} if argument.unit else {}
    return {"type": argument.type, "minimum": low, "maximum": high, **unit}


def check_range(where: str, low: float, high: float, most: int = MAX_BOUND[float]) -> None:
    """Refuse what is no range, or one that the compiler of grammars would change.

    Raises:
        RequestError: naming `where`.
    """
    if not (math.isfinite(low) and math.isfinite(high)):
        raise RequestError(f"{where} must have a finite range (got {low:g} and {high:g})")
    if not -most <= low <= high <= most:
        rule = f"min <= max, both within {most}"
        raise RequestError(f"{where} must have {rule} (got {low:g} and {high:g})")


def _text(where: str, argument: SkillArgument) -> Schema:
    return {"type": "string", "minLength": 1, "maxLength": argument.max_chars}


def _choice(where: str, argument: SkillArgument) -> Schema:
    if not argument.values:
        raise RequestError(f"{where} must have values (got none)")
    _check_names(f"{where}.values", argument.values)
    return {"enum": list(argument.values)}
