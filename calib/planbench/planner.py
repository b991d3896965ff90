"""The canonical planner: reaches the goals of a scene one by one, in their given order.

It is greedy, not optimal: the corpus needs one deterministic answer per prompt, and the judge
accepts any other.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from thor_dflash.calib.planbench.executor import PlanStep, World
from thor_dflash.calib.planbench.scene import SKILL_ARGS, Goal, Scene

ON_FAIL_OF = {
    "goto": "replan",
    "pick": "retry",
    "place": "retry",
    "open": "replan",
    "close": "retry",
    "turn_on": "abort",
    "turn_off": "abort",
    "handover": "retry",
}
"""The canonical reaction to a failing step; the judge accepts every legal one."""


class Unplannable(Exception):
    """The goals of a scene cannot be reached by the canonical planner."""


@dataclass(frozen=True)
class GoalTrace:
    """How one goal is reached: where its object was before, and the steps taken for it."""

    goal: Goal
    start: str
    held: bool
    """Whether a robot held the object already."""
    steps: tuple[PlanStep, ...]


def plan_traces(scene: Scene) -> list[GoalTrace]:
    """Return the canonical plan, goal by goal.

    Raises:
        Unplannable: a precondition cannot be met, or a later goal undoes an earlier one.
    """
    planner = _Planner(scene)
    traces: list[GoalTrace] = []
    for goal in scene.goals:
        before = len(planner.steps)
        start = planner.world.where.get(goal.subject, "")
        held = start in planner.world.robots
        planner.reach(goal)
        traces.append(GoalTrace(goal, start, held, tuple(planner.steps[before:])))
    if not all(planner.world.holds(goal) for goal in scene.goals):
        raise Unplannable("every goal must hold at the end")
    return traces


def plan_steps(scene: Scene) -> list[PlanStep]:
    """Return the canonical steps of a scene.

    Raises:
        Unplannable: as `plan_traces`.
    """
    return [step for trace in plan_traces(scene) for step in trace.steps]


def plan_text(goal: str, steps: list[PlanStep], question: str | None) -> str:
    """Return a plan of schema ``tdp.plan.v1`` as compact JSON with a fixed key order."""
    rows = [
        {"id": i, "skill": s.skill, "args": s.args, "on_fail": ON_FAIL_OF[s.skill]}
        for i, s in enumerate(steps, start=1)
    ]
    plan = {"goal": goal, "steps": rows, "needs_clarification": question}
    return json.dumps(plan, separators=(",", ":"))


class _Planner:
    def __init__(self, scene: Scene) -> None:
        self.world = World(scene)
        self.scene = scene
        self.steps: list[PlanStep] = []

    def reach(self, goal: Goal) -> None:
        if self.world.holds(goal):
            return
        if goal.kind == "at":
            self._move(goal.subject, goal.where)
        elif goal.kind in ("open", "closed"):
            robot = self._robot_for(goal.subject)
            self._stand(robot, goal.subject)
            self._do(robot, "open" if goal.kind == "open" else "close", goal.subject)
        else:
            self._switch(goal)

    def _switch(self, goal: Goal) -> None:
        robot = self._robot_for(goal.subject)
        self._stand(robot, goal.subject)
        if goal.kind == "on" and goal.subject in self.world.opened:
            self._do(robot, "close", goal.subject)
        self._do(robot, "turn_on" if goal.kind == "on" else "turn_off", goal.subject)

    def _move(self, thing: str, target: str) -> None:
        holder = next((r for r, o in self.world.holding.items() if o == thing), None)
        if holder is None:
            holder = self._robot_for(self.world.base(thing))
            self._clear(holder, thing)
            self._stand(holder, self.world.base(thing))
            self._open(holder, self.world.base(thing))
            self._do(holder, "pick", thing)
        taker = self._robot_for(self.world.base(target))
        if taker != holder:
            self._do(holder, "handover", thing, taker)
            holder = taker
        if target in self.world.where:
            self._clear(holder, target)
        self._stand(holder, self.world.base(target))
        self._open(holder, self.world.base(target))
        self._do(holder, "place", thing, target)

    def _clear(self, robot: str, thing: str) -> None:
        """Move the object on top of a thing aside, onto the place below the stack."""
        top = self.world.on_top(thing)
        if top is None:
            return
        if robot in self.world.holding:
            raise Unplannable(f"{robot} must have an empty hand to clear {thing}")
        base = self.world.base(thing)
        self._stand(robot, base)
        self._open(robot, base)
        self._do(robot, "pick", top)
        self._do(robot, "place", top, base)

    def _stand(self, robot: str, place: str) -> None:
        if robot not in self.world.standing or place in self.world.doors:
            return
        if self.world.standing[robot] == place:
            return
        room = self.world.places[place].room
        while (door := self.world.blocked_door(robot, room)) is not None:
            self._do(robot, "open", door)
        self._do(robot, "goto", place)

    def _open(self, robot: str, place: str) -> None:
        if self.world.places[place].openable and place not in self.world.opened:
            if place in self.world.on:
                self._do(robot, "turn_off", place)
            self._do(robot, "open", place)

    def _robot_for(self, place: str) -> str:
        for robot in self.scene.robots:
            if not robot.reach or place in robot.reach:
                return robot.name
        raise Unplannable(f"{place} must be within reach of a robot")

    def _do(self, robot: str, skill: str, *values: str) -> None:
        args = dict(zip(SKILL_ARGS[skill], values, strict=True))
        if len(self.scene.robots) > 1:
            args = {"robot": robot, **args}
        step = PlanStep(skill, args)
        reason = self.world.apply(step)
        if reason is not None:
            raise Unplannable(reason)
        self.steps.append(step)
