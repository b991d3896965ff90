"""Tasks whose scene is in a picture: the text has the skills, the numbers of the places and the
looks of the objects; where objects are, lids and lamps are only in the picture.

An arm on a table plans by names alone, wherever they are. So requests also name an object by its
place ("what is on plate_a"), and every tabletop task has such a request or a stack to be undone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from thor_dflash.calib.planbench.drawing import (
    COLOURS,
    FIRST_COLOUR,
    SIDE,
    DrawnScene,
    Undrawable,
    draw_scene,
)
from thor_dflash.calib.planbench.executor import PlanStep, World
from thor_dflash.calib.planbench.families import (
    Draft,
    Rejected,
    ambiguous,
    locked,
    missing_object,
    missing_place,
    plannable,
    with_goal,
)
from thor_dflash.calib.planbench.judge import judge_scene
from thor_dflash.calib.planbench.phrasing import draw_wording, think
from thor_dflash.calib.planbench.planner import GoalTrace, Unplannable, plan_text, plan_traces
from thor_dflash.calib.planbench.render import goal_text, scene_text
from thor_dflash.calib.planbench.scene import Goal, Scene
from thor_dflash.calib.planbench.task import Split, Task, goal_key, task_of
from thor_dflash.calib.planbench.words import held_out
from thor_dflash.calib.planbench.worlds import household, tabletop

THOUGHTS = {
    "named": (
        "Object {o} is {sight}, and has to get to {t}.",
        "I see {o}, {sight}, it should go to {t}.",
        "Take {o}, {sight}, to {t}.",
    ),
    "placed": (
        "On {at} is the {l}, {o}, and it has to get to {t}.",
        "The {at} has the {l}, {o}, which should go to {t}.",
    ),
    "state": ("The {at}: {v}.", "I see that {at}, so {v}."),
    "shown": ("Object {o} is {sight}.",),
    "several": ("On {at} are several.", "The {at} has several."),
    "place shown": ("On {at} is the {l}, {o}.", "The {at} has the {l}, {o}."),
    "nothing": ("On {at} is nothing.", "The {at} is empty."),
}
"""Sentences of the thinking text that read the picture. One word at a time is read, of what the
words before name: of a look, what it stands on or what lies on it, and its area's number; of a
number, lid and lamp, and a look."""
Shown = Literal["its own", "another scene's", "grey", "none"]
SHOWN: tuple[Shown, ...] = ("its own", "another scene's", "grey", "none")
"""Pictures with which a task is tried."""
GRAY = FIRST_COLOUR + COLOURS.index("gray")
DESCRIBE = ("objects", "places")
STACKED = 0.3
"""Chance that an object of a described scene is put on another one."""
ATTEMPTS = 50
"""Arrangements that are tried for one that needs another plan."""
VERBS = {"open": "open", "closed": "close", "on": "turn on", "off": "turn off"}


@dataclass(frozen=True)
class PicturedTask:
    """A task, in whose text what the picture shows is missing. The picture comes after the text."""

    task: Task
    drawn: DrawnScene


@dataclass(frozen=True)
class _Thinker:
    """Writes the thinking text of a scene."""

    rng: Random
    scene: Scene
    drawn: DrawnScene
    placed: dict[int, str]
    """Goals whose object the request names by its place, and that place."""

    def think(self, kind: str, **names: object) -> str:
        return self.rng.choice(THOUGHTS[kind]).format(**names)

    def goal(self, world: World, index: int) -> str:
        """The sentence that states a goal and what the picture shows of it."""
        goal = self.scene.goals[index]
        if goal.kind != "at":
            verb = "nothing to do" if world.holds(goal) else VERBS[goal.kind]
            return self.think("state", at=self.at(world, goal.subject), v=verb)
        names = self._names(world, goal.subject)
        placed = goal.where in self.drawn.areas
        target = self.at(world, goal.where) if placed else f'"{goal.where}"'
        return self.think("placed" if index in self.placed else "named", **names, t=target)

    def objects(self) -> str:
        """What the picture shows of each object."""
        world = World(self.scene)
        found = [self.think("shown", **self._names(world, name)) for name in self.drawn.looks]
        return " ".join(found)

    def places(self) -> str:
        """What the picture shows of each place."""
        world = World(self.scene)
        bases = {name: world.base(name) for name in self.drawn.looks}
        found: list[str] = []
        for place in self.drawn.areas:
            there = [name for name, base in bases.items() if base == place]
            if len(there) == 1:
                found.append(self.think("place shown", **self._names(world, there[0])))
            else:
                kind = "several" if there else "nothing"
                found.append(self.think(kind, at=self.at(world, place)))
        return " ".join(found)

    def at(self, world: World, place: str) -> str:
        """A place, its number and its state."""
        return f"{place}, area {self.drawn.areas[place].number}{self._state(world, place)}"

    def _names(self, world: World, thing: str) -> dict[str, str]:
        """The words about an object: its name, its look, where it is, and both in one."""
        base, looks = world.base(thing), self.drawn.looks
        on, top = world.where[thing], world.on_top(thing)
        stacked = f' on the {looks[on]}, "{on}",' if on in looks else ""
        if top is not None:
            stacked = f' under the {looks[top]}, "{top}",'
        area = f"area {self.drawn.areas[base].number}, {base}{self._state(world, base)}"
        sight = f"the {looks[thing]}{stacked} in {area}"
        return {"o": f'"{thing}"', "l": str(looks[thing]), "sight": sight,
                "at": self.at(world, base)}  # fmt: skip

    def steps(self, world: World, trace: GoalTrace) -> list[str]:
        """The sentences about what is in the way, while the steps of a goal are run."""
        found: list[str] = []
        for index, step in enumerate(trace.steps):
            if step.skill == "open" and trace.goal.kind != "open":
                found.append(think(self.rng, "shut", p=step.args["target"]))
            elif step.skill == "pick" and step.args["object"] != trace.goal.subject:
                aside = trace.steps[index + 1].args["on"]
                found.append(think(self.rng, "blocked", b=step.args["object"], p=aside))
            world.apply(step)
        return found

    def traces(self, world: World, traces: list[GoalTrace]) -> list[str]:
        """The sentences of goals that are reached one after the other."""
        found: list[str] = []
        for index, trace in enumerate(traces):
            found += [self.goal(world, index), *self.steps(world, trace)]
        return found

    def _state(self, world: World, place: str) -> str:
        lid = "open" if place in world.opened else "closed"
        lid = "locked" if place in self.scene.locked else lid
        power = "on" if place in world.on else "off"
        shown = world.places[place]
        states = ",".join([lid] * shown.openable + [power] * shown.device)
        return f"({states})" if states else ""


def sample_pictured(family: str, seed: int | str, split: Split) -> PicturedTask:
    """Draw one task with its picture. The same arguments give the same on every machine.

    Raises:
        ValueError: the family is unknown.
    """
    if family not in DRAFTS:
        raise ValueError(f"family must be one of {', '.join(DRAFTS)} (got {family})")
    rng, held = Random(f"planbench/pictured/{split}/{family}/{seed}"), split == "heldout"
    while True:
        try:
            draft, drawn = DRAFTS[family](rng, held)
        except (Rejected, Undrawable):
            continue
        if held_out(goal_key(draft.request_goals), 4) == held:
            return PicturedTask(task_of(f"pictured/{family}/{seed}", family, split, draft), drawn)


def heldout_pictured(count: int) -> list[PicturedTask]:
    """Return the first held-out tasks, alternating the families."""
    names = PICTURED_FAMILIES
    return [
        sample_pictured(names[i % len(names)], i // len(names), "heldout") for i in range(count)
    ]


def shown_picture(
    tasks: Sequence[PicturedTask], index: int, shown: Shown
) -> NDArray[np.uint8] | None:
    """The palette indices [128, 128] of what is shown with a task of `heldout_pictured`. Another
    scene is that of the next task of its family.

    Raises:
        IndexError: another scene is wanted, and no task of the family comes after this one.
    """
    if shown == "none":
        return None
    if shown == "grey":
        return np.full((SIDE, SIDE), GRAY, np.uint8)
    other = len(PICTURED_FAMILIES) if shown == "another scene's" else 0
    return tasks[index + other].drawn.pixels


def rearranged(pictured: PicturedTask) -> PicturedTask:
    """The same text with another picture, for which the plan of the first is wrong: objects have
    changed places with each other, and lids may be open or closed.

    Raises:
        ValueError: the request cannot be met.
        Rejected: no arrangement that was tried needs another plan.
    """
    task, before = pictured.task, pictured.task.scene
    if before.must_ask:
        raise ValueError(f"the request of {task.name} must be one that can be met")
    name = f"{task.name}/rearranged"
    rng, names = Random(name), [name for name, _ in before.objects]
    # Requests name an object, or the place where it is alone.
    placed = {
        index: dict(before.objects)[goal.subject]
        for index, goal in enumerate(before.goals)
        if goal.kind == "at" and f'"{goal.subject}"' not in task.messages[-1][1].split("\n")[-1]
    }
    for _ in range(ATTEMPTS):
        other = dict(zip(names, rng.sample(names, len(names)), strict=True))
        scene = _with_others(before, other, placed, rng)
        where, moves = dict(scene.objects), [goal for goal in scene.goals if goal.kind == "at"]
        if any(goal.where in (where[goal.subject], goal.subject) for goal in moves):
            continue  # An object is there already, or would have to be put on itself.
        try:
            traces = plan_traces(plannable(scene))
            drawn = draw_scene(scene, rng, pictured.drawn.looks)
        except (Rejected, Undrawable):
            continue
        if judge_scene(scene, task.plan).valid:
            continue
        thinking, plan = _answer(rng, scene, drawn, traces, placed)
        new = replace(task, name=name, thinking=thinking, plan=plan, scene=scene)
        return PicturedTask(new, drawn)
    raise Rejected(f"no arrangement of {task.name} needs another plan")


def _with_others(scene: Scene, other: dict[str, str], placed: dict[int, str], rng: Random) -> Scene:
    """A scene in which other objects are where the objects were."""
    objects = {other[name]: other.get(where, where) for name, where in scene.objects}
    goals = [
        replace(goal, subject=other[goal.subject]) if index in placed else goal
        for index, goal in enumerate(scene.goals)
    ]
    lids = [p.name for p in scene.places if p.openable and p.name not in scene.locked]
    opened = tuple(name for name in lids if rng.random() < 0.5)
    order = tuple((name, objects[name]) for name, _ in scene.objects)
    return replace(scene, objects=order, goals=tuple(goals), opened=opened)


def pictured_text(scene: Scene, drawn: DrawnScene) -> str:
    """Skills, robot, and the legend of the picture."""
    skills, robot = scene_text(scene).splitlines()[:2]
    places = ", ".join(f"{area.number} {name}" for name, area in drawn.areas.items())
    looks = ", ".join(f'"{name}" {look}' for name, look in drawn.looks.items())
    return f"{skills}\n{robot}\nPlaces: {places}\nObjects: {looks}"


def sample_scene(rng: Random) -> tuple[Scene, DrawnScene]:
    """Draw a scene to be described, with more stacks than tasks have."""
    while True:
        scene = rng.choice((tabletop, household))(rng, False)
        where = dict(scene.objects)
        for name in where:
            under = {*where.values()}
            free = [o for o in where if o != name and where[o] not in where and o not in under]
            if free and name not in under and rng.random() < STACKED:
                where[name] = rng.choice(free)
        scene = replace(scene, objects=tuple(where.items()))
        try:
            return scene, draw_scene(scene, rng)
        except Undrawable:
            continue


def described(scene: Scene, drawn: DrawnScene, rng: Random) -> tuple[str, str]:
    """A request to describe a picture, and the answer. It trains to read pictures: as its order is
    that of the legend, nothing else has to be guessed.
    """
    thinker, subject = _Thinker(rng, scene, drawn, {}), rng.choice(DESCRIBE)
    answer = thinker.objects() if subject == "objects" else thinker.places()
    legend = "\n".join(pictured_text(scene, drawn).splitlines()[2:])
    return f"{legend}\nRequest: Describe the {subject}.", answer


def _tabletop(rng: Random, held: bool) -> tuple[Draft, DrawnScene]:
    scene = plannable(tabletop(rng, held))
    traces, placed = plan_traces(scene), _placed(rng, scene, 0.85)
    steps = _steps(traces)
    moved = {goal.subject for goal in scene.goals}
    if not placed and all(s.args["object"] in moved for s in steps):
        raise Rejected("needs no picture")
    return _planned(rng, held, scene, traces, placed)


def _household(rng: Random, held: bool) -> tuple[Draft, DrawnScene]:
    scene = plannable(household(rng, held))
    return _planned(rng, held, scene, plan_traces(scene), _placed(rng, scene, 0.5))


def _placed(rng: Random, scene: Scene, chance: float) -> dict[int, str]:
    """Draw the goals that name an object by its place: it is alone there, and nothing comes."""
    world, wanted = World(scene), {goal.where for goal in scene.goals}
    bases = [world.base(name) for name, _ in scene.objects]
    found: dict[int, str] = {}
    for index, goal in enumerate(scene.goals):
        place = world.where.get(goal.subject, "")
        alone = goal.kind == "at" and bases.count(place) == 1 and place not in wanted
        if alone and rng.random() < chance:
            found[index] = place
    return found


def _planned(
    rng: Random, held: bool, scene: Scene, traces: list[GoalTrace], placed: dict[int, str]
) -> tuple[Draft, DrawnScene]:
    drawn = draw_scene(scene, rng)
    thinking, plan = _answer(rng, scene, drawn, traces, placed)
    return _draft(rng, held, scene, drawn, placed, thinking, plan), drawn


def _answer(
    rng: Random, scene: Scene, drawn: DrawnScene, traces: list[GoalTrace], placed: dict[int, str]
) -> tuple[str, str]:
    """The thinking text and the plan."""
    thinker = _Thinker(rng, scene, drawn, placed)
    thoughts = [think(rng, "start", n=len(scene.goals)), *thinker.traces(World(scene), traces)]
    thinking = " ".join([*thoughts, think(rng, "end")])
    return thinking, plan_text(goal_text(scene.goals), _steps(traces), None)


def _infeasible(rng: Random, held: bool) -> tuple[Draft, DrawnScene]:
    scene = plannable(rng.choice((tabletop, household))(rng, held))
    index = rng.choice([i for i, goal in enumerate(scene.goals) if goal.kind == "at"])
    spoil = rng.choice((missing_object, missing_place, ambiguous, locked, _empty))
    spoiled, fact, question = spoil(rng, held, scene, index)
    drawn = draw_scene(spoiled, rng)
    placed = {index: spoiled.goals[index].subject} if spoil is _empty else {}
    thinker, found = _Thinker(rng, spoiled, drawn, placed), [fact]
    if spoil is _empty:
        place = placed[index]
        found = [thinker.think("nothing", at=thinker.at(World(spoiled), place))]
    elif spoil is locked:
        found = [*_until_stuck(thinker), fact]
    start, ask = think(rng, "start", n=len(spoiled.goals)), think(rng, "ask")
    thinking = " ".join([start, *found, ask])
    plan = plan_text(goal_text(spoiled.goals), [], question)
    return _draft(rng, held, spoiled, drawn, placed, thinking, plan), drawn


def _empty(rng: Random, held: bool, scene: Scene, index: int) -> tuple[Scene, str, str]:
    """The request is for what is on a place where nothing is."""
    del held
    used = {goal.where for goal in scene.goals} | {where for _, where in scene.objects}
    free = [p.name for p in scene.places if p.name not in used and (p.openable or not p.device)]
    if not free:
        raise Rejected("no place is empty")
    place = rng.choice(free)
    spoiled = with_goal(scene, index, Goal("at", place, scene.goals[index].where), (place,))
    return spoiled, "", f"There is nothing on [{place}]."


def _until_stuck(thinker: _Thinker) -> list[str]:
    """The sentences up to the goal that meets the lock."""
    scene, world = thinker.scene, World(thinker.scene)
    for count in range(1, len(scene.goals) + 1):
        try:
            plan_traces(_first(scene, count))
        except Unplannable:
            if scene.goals[count - 1].kind != "at":
                break
            before = plan_traces(_first(scene, count - 1))
            return [*thinker.traces(world, before), thinker.goal(world, count - 1)]
    raise Rejected("no move meets the lock")


def _first(scene: Scene, count: int) -> Scene:
    return replace(scene, goals=scene.goals[:count])


def _draft(
    rng: Random,
    held: bool,
    scene: Scene,
    drawn: DrawnScene,
    placed: dict[int, str],
    thinking: str,
    plan: str,
) -> Draft:
    wording = draw_wording(rng, scene.goals, held)
    lids = {p.name for p in scene.places if p.openable}
    objects = {name for name, _ in scene.objects}
    goals = list(scene.goals)
    for index, goal in enumerate(goals):
        if index in placed:
            place = placed[index]
            subject = f"what is {'in' if place in lids else 'on'} {place}"
            goals[index] = Goal("at", subject, goal.where)
        elif goal.kind == "at":
            objects.add(goal.subject)
    request = wording.render(tuple(goals), frozenset(objects))
    prompt = f"{pictured_text(scene, drawn)}\nRequest: {request}"
    return Draft(prompt, thinking, plan, scene, wording.template(scene.goals), scene.goals)


def _steps(traces: list[GoalTrace]) -> list[PlanStep]:
    return [step for trace in traces for step in trace.steps]


DRAFTS: dict[str, Callable[[Random, bool], tuple[Draft, DrawnScene]]] = {
    "tabletop": _tabletop,
    "household": _household,
    "infeasible": _infeasible,
}
PICTURED_FAMILIES = tuple(DRAFTS)
"""Family names, in the order in which held-out tasks alternate."""
