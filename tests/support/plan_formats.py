"""Skills for the tests of plan formats."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from thor_dflash.serving.planner.answer_rule import AnswerRule
from thor_dflash.serving.planner.formats.nav2 import Nav2Waypoints
from thor_dflash.serving.planner.formats.text_format import TextPlanFormat
from thor_dflash.serving.protocol.skills import SkillSet

ROBOT: dict[str, Any] = {
    "format": "tdp.skills.v1",
    "max_steps": 4,
    "ids": {"object": ["cup", "mug_red", "<\"it's\" & >"], "place": ["table"], "nothing": []},
    "poses": {
        "dock": {"frame": "map", "x": 0, "y": 0, "yaw": 0, "note": "charge here"},
        "shelf": {"x": 2.0, "y": 1.0, "yaw": 1.57},
    },
    "area": {"x": [-5, 5], "y": [-5, 5]},
    "skills": {
        "pick": {"about": "Grasp.", "args": {"object": "object"}},
        "place": {"args": {"object": "object", "on": "place"}},
        "move_by": {"args": {"x": {"type": "number", "min": -2.0, "max": 2.0, "unit": "m"}}},
        "turn": {"args": {"n": {"type": "integer", "min": -9, "max": 9}}},
        "say": {"args": {"text": {"type": "text", "max_chars": 8}}},
        "grip": {"args": {"hand": {"type": "choice", "values": ["left", "right"]},
                          "closed": {"type": "boolean"}}},
        "wait": {},
        "open": {"args": {"what": "nothing"}},
    },
}  # fmt: skip
"""What a behaviour tree and waypoints can express."""
DOMAIN: dict[str, Any] = {
    "format": "tdp.skills.v1",
    "max_steps": 4,
    "ids": {"object": ["cup", "mug_red"], "place": ["table", "table-2"]},
    "skills": {
        "pick": {"args": {"object": "object"}},
        "place": {"args": {"object": "object", "on": "place"}},
        "wait": {},
    },
}
"""What PDDL can express."""


def skills(given: str) -> SkillSet:
    """Return the skills for a format, or in a JSON text."""
    named = {"pddl_plan": DOMAIN}.get(given, ROBOT)
    table: Any = named if not given.startswith("{") else json.loads(given)
    return msgspec.convert(table, SkillSet)


def format_of(rule: AnswerRule) -> TextPlanFormat | Nav2Waypoints:
    """Return the format of a rule that is no JSON schema's."""
    assert isinstance(rule.format, TextPlanFormat | Nav2Waypoints)
    return rule.format
