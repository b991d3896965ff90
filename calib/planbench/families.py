"""The six task families: each draws, from a random generator, a prompt, a thinking text, a plan and
a scene to judge plans on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from thor_dflash.calib.planbench.executor import PlanStep, World
from thor_dflash.calib.planbench.phrasing import draw_wording, think
from thor_dflash.calib.planbench.places import SURFACES, TRAYS
from thor_dflash.calib.planbench.planner import Unplannable, plan_steps, plan_text, plan_traces
from thor_dflash.calib.planbench.render import goal_text, history_text, scene_text, thinking_text
from thor_dflash.calib.planbench.scene import Goal, Robot, Scene, door_of
from thor_dflash.calib.planbench.words import TAGS, draw_nouns, noun_of
from thor_dflash.calib.planbench.worlds import household, mobile, pair, tabletop

STEPS_AT_MOST = 9
"""Keeps a canonical plan under about 250 tokens."""

World_maker = Callable[[Random, bool], Scene]


@dataclass(frozen=True)
class Draft:
    """A task without its name: texts, and the scene on which a plan is judged."""

    prompt: str
    thinking: str
    plan: str
    scene: Scene
    template: str
    """The request with names replaced."""
    request_goals: tuple[Goal, ...]
    """The goals that the request states."""


class Rejected(Exception):
    """A random scene is unsuitable for a task; draw again."""


def plain(make: World_maker) -> Callable[[Random, bool], Draft]:
    """Make a family of plain planning tasks on the scenes of one world."""

    def draft(rng: Random, held: bool) -> Draft:
        scene = plannable(make(rng, held))
        return planned(rng, held, scene)

    return draft


def replanning(rng: Random, held: bool) -> Draft:
    """Draw a task whose plan failed on the way: the prompt gives the history and the feedback, and
    the rest is to be planned.
    """
    scene = plannable(rng.choice((tabletop, mobile, household))(rng, held))
    return interrupted(rng, held, scene)


def interrupted(rng: Random, held: bool, scene: Scene) -> Draft:
    """The task of going on after a step of a scene's plan failed.

    Raises:
        Rejected: the plan has no step that can fail.
    """
    steps = plan_steps(scene)
    moves = [i for i, s in enumerate(steps) if s.skill in ("pick", "place") and i < 6]
    if not moves:
        raise Rejected("no step that can slip")
    last = rng.choice(moves)
    world = World(scene)
    for step in steps[:last]:
        world.apply(step)
    after, feedback = failed(rng, world, steps[last])
    wording = draw_wording(rng, scene.goals, held)
    objects = frozenset(name for name, _ in scene.objects)
    request = f"Request: {wording.render(scene.goals, objects)}"
    prompt = "\n".join([scene_text(scene), request, history_text(steps[: last + 1], feedback)])
    traces = plan_traces(plannable(after))
    rest = [step for trace in traces for step in trace.steps]
    return Draft(
        prompt,
        thinking_text(rng, after, traces, replanning=True),
        plan_text(goal_text(after.goals), rest, None),
        after,
        wording.template(scene.goals),
        scene.goals,
    )


def infeasible(rng: Random, held: bool) -> Draft:
    """Draw a task whose request names a missing object or place, an ambiguous object, or something
    behind a lock.
    """
    scene = plannable(rng.choice((tabletop, mobile, household))(rng, held))
    index = rng.choice([i for i, g in enumerate(scene.goals) if g.kind == "at"])
    spoiled, fact, question = rng.choice(SPOILS)(rng, held, scene, index)
    wording = draw_wording(rng, spoiled.goals, held)
    objects = frozenset(name for name, _ in scene.objects) | {spoiled.goals[index].subject}
    prompt = f"{scene_text(spoiled)}\nRequest: {wording.render(spoiled.goals, objects)}"
    thinking = " ".join([think(rng, "start", n=len(spoiled.goals)), fact, think(rng, "ask")])
    plan = plan_text(goal_text(spoiled.goals), [], question)
    return Draft(prompt, thinking, plan, spoiled, wording.template(spoiled.goals), spoiled.goals)


DRAFTS: dict[str, Callable[[Random, bool], Draft]] = {
    "tabletop": plain(tabletop),
    "mobile": plain(mobile),
    "household": plain(household),
    "pair": plain(pair),
    "replan": replanning,
    "infeasible": infeasible,
}
"""Family name -> how a task of it is drawn."""


def planned(rng: Random, held: bool, scene: Scene) -> Draft:
    """The task of reaching a scene's goals from its beginning."""
    wording = draw_wording(rng, scene.goals, held)
    objects = frozenset(name for name, _ in scene.objects)
    prompt = f"{scene_text(scene)}\nRequest: {wording.render(scene.goals, objects)}"
    traces = plan_traces(scene)
    steps = [step for trace in traces for step in trace.steps]
    return Draft(
        prompt,
        thinking_text(rng, scene, traces, replanning=False),
        plan_text(goal_text(scene.goals), steps, None),
        scene,
        wording.template(scene.goals),
        scene.goals,
    )


def plannable(scene: Scene) -> Scene:
    """Return a scene whose canonical plan has a suitable length.

    Raises:
        Rejected: it has not.
    """
    try:
        count = len(plan_steps(scene))
    except Unplannable as error:
        raise Rejected(str(error)) from error
    if not 1 <= count <= STEPS_AT_MOST:
        raise Rejected(f"a plan of {count} steps")
    return scene


def failed(rng: Random, world: World, step: PlanStep) -> tuple[Scene, str]:
    """Return the scene after a failed step, and the robot's feedback."""
    thing = step.args["object"]
    robot = world.scene.robots[0]
    flat = [p.name for p in world.scene.places if not p.openable and not p.device]
    here = world.base(thing) if step.skill == "pick" else step.args["on"]
    flat = [name for name in flat if name not in (here, "dock")]
    if not flat:
        raise Rejected("no other place")
    other = rng.choice(flat)
    goals, full = world.scene.goals, world.scene.full
    held = world.holding.get(robot.name)
    if step.skill == "pick":
        feedback = rng.choice(
            (
                f'The object "{thing}" slipped and is now on {other}.',
                f'The object "{thing}" is not there, it is on {other}.',
            )
        )
        world.where[thing] = other
    elif rng.random() < 0.5 and here in world.places and Goal("at", thing, here) in goals:
        feedback = f"The place {here} is full, use {other} for it."
        goals = tuple(
            Goal("at", thing, other) if g == Goal("at", thing, here) else g for g in goals
        )
        full = (here,)
    else:
        feedback = f'The object "{thing}" fell down onto {other}.'
        world.where[thing] = other
        held = None
    stood = Robot(robot.name, world.standing.get(robot.name), robot.reach, held)
    after = replace(
        world.scene,
        robots=(stood,),
        goals=goals,
        full=full,
        objects=tuple((name, world.where[name]) for name, _ in world.scene.objects),
        opened=tuple(sorted(world.opened)),
        on=tuple(sorted(world.on)),
    )
    return after, feedback


def with_goal(scene: Scene, index: int, goal: Goal, must_ask: tuple[str, ...]) -> Scene:
    """The scene with another goal at an index, which only a question can answer."""
    goals = (*scene.goals[:index], goal, *scene.goals[index + 1 :])
    return replace(scene, goals=goals, must_ask=must_ask)


def missing_object(rng: Random, held: bool, scene: Scene, index: int) -> tuple[Scene, str, str]:
    """The request names an object that is not there."""
    taken = {noun_of(name) for name, _ in scene.objects}
    noun = draw_nouns(rng, 1, held)[0]
    if noun in taken:
        raise Rejected("the noun is in the scene")
    spoiled = with_goal(scene, index, Goal("at", noun, scene.goals[index].where), (noun,))
    return spoiled, think(rng, "ask_object", o=noun), f"There is no object [{noun}] in the scene."


def missing_place(rng: Random, held: bool, scene: Scene, index: int) -> tuple[Scene, str, str]:
    """The request names a place that is not there."""
    del held
    known = {p.name for p in scene.places}
    pool = [n for n in (SURFACES if scene.robots[0].place else TRAYS) if n not in known]
    gone = rng.choice(pool)
    spoiled = with_goal(scene, index, Goal("at", scene.goals[index].subject, gone), (gone,))
    return spoiled, think(rng, "ask_place", p=gone), f"There is no place [{gone}] in the scene."


def ambiguous(rng: Random, held: bool, scene: Scene, index: int) -> tuple[Scene, str, str]:
    """The request names what could be either of two objects."""
    del held
    old = scene.goals[index].subject
    noun = noun_of(old)
    if any(noun_of(name) == noun for name, _ in scene.objects if name != old):
        raise Rejected("more than two could be meant")
    if any(g.where == old for g in scene.goals) or old in dict(scene.objects).values():
        raise Rejected("the object carries another")
    first, second = (f"{noun}_{tag}" for tag in rng.sample(TAGS, 2))
    twin_at = rng.choice([w for _, w in scene.objects if w in {p.name for p in scene.places}])
    pairs = [(first, w) if name == old else (name, w) for name, w in scene.objects]
    pairs.insert(rng.randint(0, len(pairs)), (second, twin_at))
    order = [name for name, _ in pairs if name in (first, second)]
    spoiled = with_goal(
        replace(scene, objects=tuple(pairs)),
        index,
        Goal("at", noun, scene.goals[index].where),
        (first, second),
    )
    question = f"Is it [{order[0]}] or [{order[1]}]?"
    return spoiled, think(rng, "ask_which", o=noun, a=order[0], b=order[1]), question


def locked(rng: Random, held: bool, scene: Scene, index: int) -> tuple[Scene, str, str]:
    """A place or door that the goal needs is locked."""
    del held
    goal = scene.goals[index]
    objects = dict(scene.objects)
    lids = {p.name for p in scene.places if p.openable}
    rooms = {p.name: p.room for p in scene.places}
    ends = [objects[goal.subject], goal.where]
    inside = [e for e in ends if e in lids]
    doors = [
        door_of(rooms[e]) for e in ends if rooms.get(e) in scene.doors and _apart(scene, rooms[e])
    ]
    options = inside + doors
    if not options:
        raise Rejected("nothing to lock")
    lock = rng.choice(options)
    spoiled = replace(
        with_goal(scene, index, goal, (lock,)),
        locked=(*(n for n in scene.locked if n != lock), lock),
        opened=tuple(n for n in scene.opened if n != lock),
        on=tuple(n for n in scene.on if n != lock),
    )
    return spoiled, think(rng, "ask_locked", p=lock), f"The [{lock}] is locked."


def _apart(scene: Scene, room: str) -> bool:
    """Whether the robot starts outside a room, so that its door matters."""
    start = scene.robots[0].place
    return all(p.room != room for p in scene.places if p.name == start)


SPOILS = (missing_object, missing_place, ambiguous, locked)
"""What makes one move of a scene impossible: (rng, held, scene, index of its goal) -> the scene
with what cannot be done, the thought that finds it, and the question to the user.

Raises Rejected: that move cannot be spoiled so.
"""
