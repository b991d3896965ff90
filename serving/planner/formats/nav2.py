"""Plans as waypoints of Nav2: the goal of nav2_msgs/action/FollowWaypoints. The model writes ids of
poses, or coordinates inside an area.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, cast

from thor_dflash.core.errors import RequestError
from thor_dflash.core.message_text import show
from thor_dflash.serving.planner.partial_json import StepStream
from thor_dflash.serving.planner.plan_format import JsonPlan, Step, StepReader
from thor_dflash.serving.planner.plan_schema import Schema, closed_object
from thor_dflash.serving.planner.schema_validator import SchemaValidator, read_schema
from thor_dflash.serving.planner.skill_schema import check_range, ids_of
from thor_dflash.serving.protocol.skills import SkillSet

COORDINATES = ("x", "y", "yaw")
"""Metres and radians."""
SKILL = "waypoint"
"""The `skill` of every step."""


class Nav2Waypoints:
    """See PlanFormat. Its grammar is a schema, and `text` of the result is JSON that obeys it."""

    name = "nav2_waypoints"
    demanded = True

    def __init__(self, given: SkillSet) -> None:
        """Take the poses and the area; skills have no part in it.

        Raises:
            RequestError: there are neither, or a pose has no place; names it.
        """
        ids_of(given)
        self._poses = {id: _pose(f"poses.{id}", pose) for id, pose in given.poses.items()}
        frames = {pose["frame_id"]: id for id, pose in self._poses.items()}
        kinds: list[Schema] = []
        if self._poses:
            kinds.append(closed_object({"pose_id": {"enum": list(self._poses)}}))
        if given.area is not None:
            frames.setdefault(given.area.frame, "area")
            ranges = {name: getattr(given.area, name) for name in COORDINATES}
            for name, (low, high) in ranges.items():
                check_range(f"area.{name}", low, high)
            bounds = {
                n: {"type": "number", "minimum": a, "maximum": b} for n, (a, b) in ranges.items()
            }
            kinds.append(closed_object(bounds))
        if not kinds:
            raise RequestError("poses must be given, or an area, for nav2_waypoints (got neither)")
        if len(frames) > 1:
            got = ", ".join(f"{show(frame)} of {id}" for frame, id in frames.items())
            rule = "have one frame, which is that of the area, for nav2_waypoints"
            raise RequestError(f"poses must {rule} (got {got})")
        (self._frame,) = frames
        way = {
            "type": "array",
            "minItems": 1,
            "maxItems": given.max_steps,
            "items": {"anyOf": kinds},
        }
        self.schema = closed_object({"frame_id": {"const": self._frame}, "waypoints": way})
        self._json = JsonPlan(SchemaValidator(read_schema(self.schema)))

    def reader(self) -> StepReader:
        """See PlanFormat."""
        return _WaypointReader(self)

    def read(self, text: str, *, whole: bool) -> tuple[dict[str, object] | None, bool]:
        """See PlanFormat."""
        plan, valid = self._json.read(text, whole=whole)
        if plan is None or not valid:
            return None, False
        points = cast("list[dict[str, Any]]", plan["waypoints"])
        steps = [self.step(point, number) for number, point in enumerate(points, 1)]
        goal = {"poses": [_stamped(step["args"]) for step in steps]}
        return {"format": self.name, "body": json.dumps(goal), "steps": steps}, True

    def step(self, point: Mapping[str, Any], number: int) -> Step:
        """Return the step of a valid waypoint."""
        place = self._poses[point["pose_id"]] if "pose_id" in point else {"frame_id": self._frame}
        return {"id": number, "skill": SKILL, "args": {**point, **place}}

    def sample(self) -> str:
        """Return waypoints to up to three poses, or one inside the area."""
        points: list[object] = [{"pose_id": id} for id in list(self._poses)[:3]]
        if not points:
            bounds = self.schema["properties"]["waypoints"]["items"]["anyOf"][0]["properties"]
            points = [{n: min(max(0.0, b["minimum"]), b["maximum"]) for n, b in bounds.items()}]
        table = {"frame_id": self._frame, "waypoints": points}
        return json.dumps(table, separators=(",", ":"), ensure_ascii=False)

    def allows(self, point: Mapping[str, Any]) -> bool:
        """Whether a waypoint is one of the robot's."""
        plan = json.dumps({"frame_id": self._frame, "waypoints": [point]})
        return self._json.read(plan, whole=True)[1]


class _WaypointReader:
    """See StepReader."""

    def __init__(self, format: Nav2Waypoints) -> None:
        self._format = format
        self._stream = StepStream()
        self._count = 0

    def feed(self, text: str) -> list[Step]:
        steps: list[Step] = []
        for point in self._stream.feed(text):
            if self._count >= 0 and self._format.allows(point):
                self._count += 1
                steps.append(self._format.step(point, self._count))
            else:
                self._count = -1  # no plan: nothing of the rest is a step
        return steps


def _pose(where: str, pose: Mapping[str, object]) -> dict[str, Any]:
    """The place of a pose. What else is in it is the executor's."""
    found: dict[str, Any] = {"frame_id": pose.get("frame", "map")}
    if not isinstance(found["frame_id"], str) or not found["frame_id"]:
        rule = "be the name of a frame, for plan_format nav2_waypoints"
        raise RequestError(f"{where}.frame must {rule} (got {show(pose['frame'])})")
    for name in COORDINATES:
        number = pose.get(name)
        if isinstance(number, bool) or not isinstance(number, int | float):
            rule = "be a number, for plan_format nav2_waypoints"
            raise RequestError(f"{where}.{name} must {rule} (got {show(number)})")
        check_range(f"{where}.{name}", number, number)
        found[name] = float(number)
    return found


def _stamped(place: Mapping[str, Any]) -> dict[str, Any]:
    """A geometry_msgs/PoseStamped."""
    turn = place["yaw"] / 2
    return {
        "header": {"frame_id": place["frame_id"]},
        "pose": {
            "position": {"x": float(place["x"]), "y": float(place["y"]), "z": 0.0},
            "orientation": {"x": 0.0, "y": 0.0, "z": math.sin(turn), "w": math.cos(turn)},
        },
    }
