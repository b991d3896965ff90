"""Replanning: pairs of tasks, the second of which is the first after something changed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Literal

from thor_dflash.calib.planbench.families import Draft, Rejected, interrupted, plannable, planned
from thor_dflash.calib.planbench.scene import Goal, Scene
from thor_dflash.calib.planbench.task import Task, task_of
from thor_dflash.calib.planbench.worlds import household, mobile, tabletop

Change = Literal["object", "step", "goal"]
CHANGES: tuple[Change, ...] = ("object", "step", "goal")
"""What changed: where an object is, a step that failed, where an object is to go."""


@dataclass(frozen=True, slots=True)
class Again:
    """A task, and the same one after a change."""

    change: Change
    first: Task
    second: Task


def again(count: int) -> list[Again]:
    """The first pairs, alternating the changes. The same on every machine; objects and wordings are
    those of held-out tasks.
    """
    return [_pair(CHANGES[i % len(CHANGES)], i // len(CHANGES)) for i in range(count)]


def _pair(change: Change, seed: int) -> Again:
    rng = Random(f"planbench/again/{change}/{seed}")
    while True:
        try:
            scene = plannable(rng.choice((tabletop, mobile, household))(rng, True))
            words = rng.getrandbits(32)  # both requests have the same wording
            before = planned(Random(words), True, scene)
            after = _changed(change, rng, words, scene)
        except Rejected:
            continue
        name = f"again/{change}/{seed}"
        first = task_of(f"{name}/0", change, "heldout", before)
        return Again(change, first, task_of(f"{name}/1", change, "heldout", after))


def _changed(change: Change, rng: Random, words: int, scene: Scene) -> Draft:
    if change == "step":
        return interrupted(Random(words), True, scene)
    moves = [i for i, goal in enumerate(scene.goals) if goal.kind == "at"]
    if not moves:
        raise Rejected("nothing is to be moved")
    index = rng.choice(moves)
    goal, here = scene.goals[index], dict(scene.objects)
    flat = [p.name for p in scene.places if not p.openable and not p.device and p.name != "dock"]
    free = [name for name in flat if name not in (here[goal.subject], goal.where)]
    if not free or goal.subject in here.values():
        raise Rejected("the object cannot be elsewhere")
    other = rng.choice(free)
    if change == "goal":
        goals = list(scene.goals)
        goals[index] = Goal("at", goal.subject, other)
        return planned(Random(words), True, plannable(replace(scene, goals=tuple(goals))))
    objects = tuple((n, other if n == goal.subject else w) for n, w in scene.objects)
    return planned(Random(words), True, plannable(replace(scene, objects=objects)))
