"""Renders a task as text: system message, scene, history, thinking and goal."""

from __future__ import annotations

from random import Random

from thor_dflash.calib.planbench.executor import PlanStep, World
from thor_dflash.calib.planbench.phrasing import say, think
from thor_dflash.calib.planbench.planner import GoalTrace
from thor_dflash.calib.planbench.scene import HALL, SKILL_ARGS, Goal, Scene, door_of

SYSTEM = (
    "You are a robot planner. Think briefly, then answer with one JSON plan with goal, steps and "
    "needs_clarification. Use only the skills, places and objects given. If the request cannot be "
    "done or is unclear, give no steps and say why."
)


def scene_text(scene: Scene) -> str:
    """Return the scene and the skills as the user message shows them, with the state of places in
    brackets.
    """
    lines = ["Skills: " + ", ".join(f"{s}({','.join(_args(scene, s))})" for s in scene.skills)]
    lines += [_robot_line(scene)]
    if scene.doors:
        rooms = [f"{door_of(r)} {_lid(scene, door_of(r))}({_names(scene, r)})" for r in scene.doors]
        lines.append(
            "Places behind doors: " + ", ".join([*rooms, f"{HALL}({_names(scene, HALL)})"])
        )
    elif len(scene.robots) == 1:
        lines.append("Places: " + ", ".join(_place(scene, p.name) for p in scene.places))
    held = {r.holding for r in scene.robots}
    objects = frozenset(name for name, _ in scene.objects)
    under = {where: f' under "{name}"' for name, where in scene.objects if where in objects}
    lines += [
        f"{name} on {say(where, objects)}{under.get(name, '')}"
        for name, where in scene.objects
        if name not in held
    ]
    return "\n".join(lines)


def history_text(steps: list[PlanStep], feedback: str) -> str:
    """Return the executed steps, and how the last one failed."""
    calls = [
        s.skill + "(" + ",".join(f'"{value}"' for value in s.args.values()) + ")" for s in steps
    ]
    done = [f"{call} ok" for call in calls[:-1]] + [f"{calls[-1]} failed"]
    return "Done: " + ", ".join(done) + f"\nFeedback: {feedback}"


def thinking_text(rng: Random, scene: Scene, traces: list[GoalTrace], replanning: bool) -> str:
    """Return a short reasoning that states where things are and what is in the way, in the order of
    the plan.
    """
    objects = frozenset(name for name, _ in scene.objects)
    thoughts = [think(rng, "trouble") if replanning else think(rng, "start", n=len(scene.goals))]
    for trace in traces:
        thoughts += _goal_thoughts(rng, trace, objects)
    return " ".join([*thoughts, think(rng, "end")])


def goal_text(goals: tuple[Goal, ...]) -> str:
    """Return the "goal" field of a plan."""
    return "".join(goal.text() for goal in goals)


def _goal_thoughts(rng: Random, trace: GoalTrace, objects: frozenset[str]) -> list[str]:
    goal = trace.goal
    thing = goal.subject
    if not trace.steps:
        return [think(rng, "done", t=_topic(goal, objects))]
    if goal.kind != "at":
        verb = {"open": "open", "closed": "close", "on": "turn on", "off": "turn off"}[goal.kind]
        thoughts = [think(rng, "state", v=verb, t=thing)]
    elif trace.held:
        thoughts = [think(rng, "held", o=thing, t=say(goal.where, objects))]
    else:
        thoughts = [
            think(rng, "at", o=thing, p=say(trace.start, objects), t=say(goal.where, objects))
        ]
    for index, step in enumerate(trace.steps):
        if step.skill == "open" and goal.kind != "open":
            thoughts.append(think(rng, "shut", p=step.args["target"]))
        elif step.skill == "handover":
            thoughts.append(
                think(rng, "handover", r=step.args["robot"], s=step.args["to"], t=goal.where)
            )
        elif step.skill == "pick" and step.args["object"] != thing:
            aside = trace.steps[index + 1].args["on"]
            thoughts.append(think(rng, "blocked", b=step.args["object"], p=aside))
    return thoughts


def _topic(goal: Goal, objects: frozenset[str]) -> str:
    return say(goal.subject, objects) if goal.kind == "at" else goal.subject


def _args(scene: Scene, skill: str) -> tuple[str, ...]:
    return (("robot",) if len(scene.robots) > 1 else ()) + SKILL_ARGS[skill]


def _robot_line(scene: Scene) -> str:
    robot, *others = scene.robots
    if others:
        arms = (f"{r.name}(reach {', '.join(r.reach)})" for r in scene.robots)
        return "Robots: " + ", ".join(arms) + ", hands empty"
    hand = "hand empty" if robot.holding is None else f'holding "{robot.holding}"'
    return (
        f"Robot: {robot.name}, {hand}"
        if robot.place is None
        else f"Robot: at {robot.place}, {hand}"
    )


def _names(scene: Scene, room: str) -> str:
    return ", ".join(p.name for p in scene.places if p.room == room)


def _lid(scene: Scene, name: str) -> str:
    if name in scene.locked:
        return "locked"
    return "open" if name in scene.opened else "closed"


def _place(scene: Scene, name: str) -> str:
    place = World(scene).places[name]
    state = [_lid(scene, name)] if place.openable else []
    if place.device:
        state.append("on" if name in scene.on else "off")
    return f"{name}({','.join(state)})" if state else name
