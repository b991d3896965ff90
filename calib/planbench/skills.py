"""The skills of a scene's robots and their possible arguments, to make a plan's schema from."""

from __future__ import annotations

from thor_dflash.calib.planbench.scene import SKILL_ARGS, Scene, door_of

Skills = dict[str, dict[str, str]]
"""Skill -> argument -> name of the set that its value is from."""
Ids = dict[str, list[str]]

_OF = {
    "place": "place",
    "object": "object",
    "on": "spot",
    "target": "lid",
    "device": "device",
    "to": "robot",
}
"""Argument -> name of the set that its value is from."""


def skills_of(scene: Scene) -> tuple[Skills, Ids]:
    """Return the skills with their arguments in the order written, and the ids of each set."""
    first = {"robot": "robot"} if len(scene.robots) > 1 else {}
    skills = {
        skill: {**first, **{arg: _OF[arg] for arg in SKILL_ARGS[skill]}} for skill in scene.skills
    }
    doors = [door_of(room) for room in scene.doors]
    places, objects = [p.name for p in scene.places], [name for name, _ in scene.objects]
    ids = {
        "robot": [robot.name for robot in scene.robots],
        "place": places,
        "object": objects,
        "spot": places + objects,
        "lid": [p.name for p in scene.places if p.openable] + doors,
        "device": [p.name for p in scene.places if p.device],
    }
    return skills, ids
