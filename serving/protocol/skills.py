"""A robot's skills as data, `tdp.skills.v1`: a file of the robot, and the field `skills` of a plan.

docs/reference/protocol.md describes it. A plan of it can hold ids, numbers in their ranges and
short texts; frames and coordinates of `poses` are for the robot's executor: the model writes ids.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

SKILLS = "tdp.skills.v1"
PlanFormatName = Literal["json_steps", "bt_cpp_xml", "pddl_plan", "nav2_waypoints"]
"""What an answer is: `tdp.plan.v1`, a tree of BehaviorTree.CPP 4, lines of PDDL, or waypoints."""
Chars = Annotated[int, Meta(ge=1, le=4096)]


class SkillArgument(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An argument that is no id of a set. A number has a unit and a range, a text a length."""

    type: Literal["number", "integer", "boolean", "text", "choice"]
    min: float | None = None
    max: float | None = None
    unit: str | None = None
    max_chars: Chars | None = None
    values: tuple[str, ...] | None = None


class Skill(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One skill. `args`: argument, in the order in which a plan writes them -> a set or a type."""

    about: str = ""
    args: dict[str, str | SkillArgument] = {}


class Area(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where waypoints may lie that are no poses: least and most of each coordinate."""

    x: tuple[float, float]
    y: tuple[float, float]
    yaw: tuple[float, float] = (-3.14, 3.14)
    """Radians."""
    frame: str = "map"


class SkillSet(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a robot can do, and with what."""

    format: Literal["tdp.skills.v1"]
    skills: dict[str, Skill]
    ids: dict[str, tuple[str, ...]] = {}
    """Set -> ids that exist now. A skill that needs one of an empty set is left out."""
    poses: dict[str, dict[str, Any]] = {}
    """Id of a pose -> what the executor knows of it. Its ids are the set `pose`."""
    max_steps: Annotated[int, Meta(ge=1, le=64)] = 24
    area: Area | None = None
    """None: a waypoint is one of the poses."""
    numbered: bool = True
    """Whether the grammar counts the steps, which makes the schema longer."""
