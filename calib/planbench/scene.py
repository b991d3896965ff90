"""The symbolic world of a planning task: positions, states and goals.

A scene is plain frozen data, so that a task can be stored as one JSON line and judged from that
line alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SKILL_ARGS: dict[str, tuple[str, ...]] = {
    "goto": ("place",),
    "pick": ("object",),
    "place": ("object", "on"),
    "open": ("target",),
    "close": ("target",),
    "turn_on": ("device",),
    "turn_off": ("device",),
    "handover": ("object", "to"),
}
"""Skill name -> argument names in the order in which they are written. In scenes with two robots,
"robot" comes first.
"""

ON_FAIL = ("retry", "skip", "replan", "abort")
"""What a controller may do when a step fails."""

HALL = "hall"
"""The room that connects all others; it has no door of its own."""


@dataclass(frozen=True)
class Robot:
    """One robot. A fixed arm has no place; a mobile one stands at exactly one place."""

    name: str
    place: str | None = None
    """Where a mobile robot stands; None for a fixed arm."""
    reach: tuple[str, ...] = ()
    """Places a fixed arm can reach; empty means every place."""
    holding: str | None = None


@dataclass(frozen=True)
class Place:
    """Somewhere an object can be: a surface, a container that opens, or a device that turns on."""

    name: str
    room: str = HALL
    openable: bool = False
    device: bool = False


@dataclass(frozen=True)
class Goal:
    """A wanted fact: ("at", object, place) or (("open" | "closed" | "on" | "off"), thing, "")."""

    kind: str
    subject: str
    where: str = ""

    def text(self) -> str:
        """The goal in the compact notation of a plan's "goal" field, e.g. ``[mug->tray_a]``."""
        return (
            f"[{self.subject}->{self.where}]"
            if self.kind == "at"
            else f"[{self.subject}={self.kind}]"
        )


@dataclass(frozen=True)
class Scene:
    """Everything that the executor needs: the initial state, the available skills and the goals."""

    robots: tuple[Robot, ...]
    places: tuple[Place, ...]
    objects: tuple[tuple[str, str], ...]
    """(object, what it is on or in): a place, another object, or the robot that holds it."""
    skills: tuple[str, ...]
    goals: tuple[Goal, ...]
    doors: tuple[str, ...] = ()
    """Rooms that have a door to the hall; the door of room R is called "R_door"."""
    opened: tuple[str, ...] = ()
    """Doors and openable places that are open."""
    on: tuple[str, ...] = ()
    """Devices that are running."""
    locked: tuple[str, ...] = ()
    """Doors and openable places that no skill can open."""
    full: tuple[str, ...] = ()
    """Places that take no more objects."""
    must_ask: tuple[str, ...] = ()
    """Names that the question to the user must mention; not empty if no plan exists."""


def door_of(room: str) -> str:
    """Return the name of the door between a room and the hall."""
    return f"{room}_door"


def scene_to_json(scene: Scene) -> dict[str, Any]:
    """Convert a scene to plain JSON types."""
    return {
        "robots": [[r.name, r.place, list(r.reach), r.holding] for r in scene.robots],
        "places": [[p.name, p.room, p.openable, p.device] for p in scene.places],
        "objects": [list(pair) for pair in scene.objects],
        "skills": list(scene.skills),
        "goals": [[g.kind, g.subject, g.where] for g in scene.goals],
        "doors": list(scene.doors),
        "opened": list(scene.opened),
        "on": list(scene.on),
        "locked": list(scene.locked),
        "full": list(scene.full),
        "must_ask": list(scene.must_ask),
    }


def scene_from_json(data: dict[str, Any]) -> Scene:
    """The inverse of ``scene_to_json``."""
    return Scene(
        robots=tuple(Robot(n, p, tuple(r), h) for n, p, r, h in data["robots"]),
        places=tuple(Place(n, r, o, d) for n, r, o, d in data["places"]),
        objects=tuple((name, where) for name, where in data["objects"]),
        skills=tuple(data["skills"]),
        goals=tuple(Goal(k, s, w) for k, s, w in data["goals"]),
        doors=tuple(data["doors"]),
        opened=tuple(data["opened"]),
        on=tuple(data["on"]),
        locked=tuple(data["locked"]),
        full=tuple(data["full"]),
        must_ask=tuple(data["must_ask"]),
    )
