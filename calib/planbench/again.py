"""A plan that fails on the way: what a robot could do of it is done, and the rest is asked anew.

A grammar cannot know that a door must be opened before a robot goes through it: which step may come
next depends on all steps before, and a JSON schema says of each element of an array what it may be,
not what may follow what. The executor on the robot does know. It stops at the first step that is
not possible, and the same request is asked of the world as it then is.
"""

from __future__ import annotations

import json
from dataclasses import replace

from thor_dflash.calib.planbench.executor import Step, World
from thor_dflash.calib.planbench.render import scene_text
from thor_dflash.calib.planbench.scene import Scene
from thor_dflash.calib.planbench.task import Task

REQUEST = "\nRequest: "


def again(task: Task, plan_text: str) -> Task | None:
    """The task from where the world stands after the steps of a plan that are possible, the request
    unchanged. None where no step is: asking the same thing gives the same plan. The plan obeys the
    schema of the scene.
    """
    world, done = World(task.scene), 0
    for step in json.loads(plan_text)["steps"]:
        if world.apply(Step(step["skill"], step["args"])) is not None:
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
