"""Replanning: executes the possible first steps of a plan, and asks again for the rest.

A grammar cannot know that a door must be opened before a robot goes through it: which step is
possible depends on all previous steps, and a JSON schema constrains each element of an array, not
their order. The executor on the robot does know. It stops at the first impossible step, and the
same request is planned again for the world as it is then.
"""

from __future__ import annotations

import json
from dataclasses import replace

from thor_dflash.calib.planbench.executor import PlanStep, World
from thor_dflash.calib.planbench.render import scene_text
from thor_dflash.calib.planbench.scene import Scene
from thor_dflash.calib.planbench.task import Task

REQUEST = "\nRequest: "


def again(task: Task, plan_text: str) -> Task | None:
    """Return the task with the same request and the world as it is after the possible first steps
    of a plan. None if the first step is impossible, as the same prompt would give the same plan.
    The plan must obey the schema of the scene.
    """
    world, done = World(task.scene), 0
    for step in json.loads(plan_text)["steps"]:
        if world.apply(PlanStep(step["skill"], step["args"])) is not None:
            break
        done += 1
    if not done:
        return None
    scene = _scene(world)
    system, (role, content) = task.messages
    request = content[content.index(REQUEST) :]
    return replace(task, scene=scene, messages=(system, (role, scene_text(scene) + request)))


def _scene(world: World) -> Scene:
    robots = tuple(
        replace(
            robot,
            place=world.standing.get(robot.name),
            holding=world.holding.get(robot.name),
        )
        for robot in world.scene.robots
    )
    return replace(
        world.scene,
        robots=robots,
        objects=tuple((name, world.where[name]) for name, _ in world.scene.objects),
        opened=tuple(sorted(world.opened)),
        on=tuple(sorted(world.on)),
    )
