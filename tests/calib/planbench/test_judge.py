"""The executor of plans and the judge, on hard cases: hand-written scenes with right plans, plans
that are almost right, and texts that are no plans.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from thor_dflash.calib.planbench.executor import PlanStep, World
from thor_dflash.calib.planbench.judge import judge_scene
from thor_dflash.calib.planbench.scene import (
    Goal,
    Place,
    Robot,
    Scene,
)

TABLE = Scene(
    robots=(Robot("arm"),),
    places=(Place("table"), Place("bin"), Place("tray")),
    objects=(("mug", "table"), ("lid", "mug"), ("nut", "tray")),
    skills=("pick", "place"),
    goals=(Goal("at", "mug", "bin"),),
)
ROOMS = Scene(
    robots=(Robot("robot", place="desk"),),
    places=(Place("desk", "office"), Place("sink", "kitchen"), Place("dock")),
    objects=(("cup", "sink"),),
    skills=("goto", "pick", "place", "open"),
    goals=(Goal("at", "cup", "dock"),),
    doors=("office", "kitchen"),
)
HOME = Scene(
    robots=(Robot("robot", place="counter"),),
    places=(
        Place("counter"),
        Place("fridge", openable=True),
        Place("oven", openable=True, device=True),
    ),
    objects=(("milk", "fridge"), ("pie", "counter")),
    skills=("goto", "pick", "place", "open", "close", "turn_on", "turn_off"),
    goals=(Goal("at", "pie", "oven"), Goal("on", "oven")),
    locked=("fridge",),
)
PAIR = Scene(
    robots=(Robot("left", reach=("tray",)), Robot("right", reach=("bin",))),
    places=(Place("tray"), Place("bin")),
    objects=(("mug", "tray"), ("nut", "bin")),
    skills=("pick", "place", "handover"),
    goals=(Goal("at", "mug", "bin"),),
)


def plan(*steps: tuple[str, dict[str, str]], **changes: Any) -> str:
    rows = [
        {"id": i, "skill": s, "args": a, "on_fail": "retry"}
        for i, (s, a) in enumerate(steps, start=1)
    ]
    return json.dumps({"goal": "g", "steps": rows, "needs_clarification": None, **changes})


def pick(thing: str) -> tuple[str, dict[str, str]]:
    return "pick", {"object": thing}


def place(thing: str, on: str) -> tuple[str, dict[str, str]]:
    return "place", {"object": thing, "on": on}


CLEAR = (pick("lid"), place("lid", "table"))
GOOD = plan(*CLEAR, pick("mug"), place("mug", "bin"))
GOTO_DOCK = ("goto", {"place": "dock"})
OPEN_OFFICE = ("open", {"target": "office_door"})
OPEN_KITCHEN = ("open", {"target": "kitchen_door"})
FETCH = (
    OPEN_OFFICE,
    OPEN_KITCHEN,
    ("goto", {"place": "sink"}),
    pick("cup"),
    GOTO_DOCK,
    place("cup", "dock"),
)


def test_a_right_plan_is_valid() -> None:
    assert judge_scene(TABLE, GOOD).valid
    assert judge_scene(ROOMS, plan(*FETCH)).valid


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ((pick("mug"), place("mug", "bin")), "must be clear"),
        ((pick("lid"), pick("mug")), "must be empty"),
        ((place("mug", "bin"),), "must hold mug"),
        ((*CLEAR, pick("mug"), place("mug", "shelf")), "on must be a place or object"),
        ((pick("vase"),), "object must be in the scene"),
        (CLEAR, "goal [mug->bin]"),
        ((("goto", {"place": "bin"}),), "skill must be one of pick, place"),
    ],
)
def test_table_failures_are_named(
    steps: tuple[tuple[str, dict[str, str]], ...], reason: str
) -> None:
    verdict = judge_scene(TABLE, plan(*steps))
    assert not verdict.valid
    assert reason in verdict.reason


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        (FETCH[1:], "office_door must be open"),
        ((FETCH[0], *FETCH[2:]), "kitchen_door must be open"),
        ((*FETCH[:2], *FETCH[3:]), "must be at sink"),
        ((*FETCH[:4], FETCH[5]), "must be at dock"),
        ((OPEN_KITCHEN,), "office_door must be open before reaching"),
        ((("open", {"target": "desk"}),), "must be a door or a container"),
    ],
)
def test_doors_and_places_are_checked(
    steps: tuple[tuple[str, dict[str, str]], ...], reason: str
) -> None:
    verdict = judge_scene(ROOMS, plan(*steps))
    assert not verdict.valid
    assert reason in verdict.reason


def run(scene: Scene, *steps: tuple[str, dict[str, str]]) -> str | None:
    """Returns why the first impossible step is impossible; None if all are possible."""
    world = World(scene)
    for skill, args in steps:
        reason = world.apply(PlanStep(skill, args))
        if reason is not None:
            return reason
    return None


def test_containers_and_devices() -> None:
    to_oven = ("goto", {"place": "oven"})
    opened, closed = ("open", {"target": "oven"}), ("close", {"target": "oven"})
    turned = ("turn_on", {"device": "oven"})
    assert judge_scene(
        HOME, plan(pick("pie"), to_oven, opened, place("pie", "oven"), closed, turned)
    ).valid
    assert "must be open before placing" in str(
        run(HOME, pick("pie"), to_oven, place("pie", "oven"))
    )
    assert "must be closed before turning on" in str(run(HOME, to_oven, opened, turned))
    assert "must be off before opening" in str(run(HOME, to_oven, turned, opened))
    assert "must be at oven" in str(run(HOME, turned))
    assert "device must be a device" in str(run(HOME, ("turn_on", {"device": "counter"})))
    fridge = ("goto", {"place": "fridge"})
    assert "must be unlocked" in str(run(HOME, fridge, ("open", {"target": "fridge"})))
    assert "must be open before picking" in str(run(HOME, fridge, pick("milk")))


def test_two_robots() -> None:
    take = ("pick", {"robot": "left", "object": "mug"})
    give = ("handover", {"robot": "left", "object": "mug", "to": "right"})
    put = ("place", {"robot": "right", "object": "mug", "on": "bin"})
    assert judge_scene(PAIR, plan(take, give, put)).valid
    own = ("place", {"robot": "left", "object": "mug", "on": "bin"})
    assert "within reach of left" in judge_scene(PAIR, plan(take, own)).reason
    busy = ("pick", {"robot": "right", "object": "nut"})
    assert "hand of right must be empty" in judge_scene(PAIR, plan(take, busy, give)).reason
    self_give = ("handover", {"robot": "left", "object": "mug", "to": "left"})
    assert "another robot" in judge_scene(PAIR, plan(take, self_give)).reason
    stranger = ("pick", {"robot": "middle", "object": "mug"})
    assert "robot must be in the scene" in judge_scene(PAIR, plan(stranger)).reason
    assert "args of pick must be robot, object" in judge_scene(PAIR, plan(pick("mug"))).reason
    on_held = ("place", {"robot": "right", "object": "nut", "on": "mug"})
    assert "must be put down" in judge_scene(PAIR, plan(take, busy, on_held)).reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "must be JSON"),
        (GOOD + GOOD, "must be JSON"),
        ("[" * 4000, "must be JSON"),
        ("[]", "must be an object"),
        ('{"goal":"g","goal":"g","steps":[],"needs_clarification":null}', "must not repeat"),
        ('{"goal":"g","steps":[],"needs_clarification":NaN}', "must be finite"),
        (plan(goal=7), "goal must be a string"),
        (plan(extra=1), "plan keys must be"),
        (plan(needs_clarification="why?"), "needs_clarification must be null"),
        ("x" * 20000, "at most 16384 characters"),
    ],
)
def test_broken_texts_are_refused(text: str, reason: str) -> None:
    verdict = judge_scene(TABLE, text)
    assert not verdict.valid
    assert reason in verdict.reason


def step(**changes: Any) -> str:
    """Returns a plan of one step that is right but for the changes."""
    row = {"id": 1, "skill": "pick", "args": {"object": "lid"}, "on_fail": "retry", **changes}
    return plan(steps=[row])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (step(id=2), "id must be 1"),
        (step(id=10**4000), "id must be 1 (got a very long integer)"),
        (step(skill="fly"), "skill must be one of"),
        (step(on_fail="panic"), "on_fail must be one of"),
        (step(args={"object": "lid", "on": "bin"}), "args of pick must be object"),
        (step(args={"object": 3}), "args.object must be a string"),
        (step(extra=0), "keys must be id, skill, args, on_fail"),
        (plan(steps=[7]), "keys must be id"),
        (plan(*[pick("lid")] * 25), "at most 24 steps"),
    ],
)
def test_broken_steps_are_refused(text: str, reason: str) -> None:
    assert reason in judge_scene(TABLE, text).reason


def test_a_task_that_cannot_be_done_wants_a_question_and_no_steps() -> None:
    asking = replace(TABLE, must_ask=("mug_red", "mug_blue"))
    question = "Is it [mug_red] or [mug_blue]?"
    assert judge_scene(asking, plan(needs_clarification=question)).valid
    assert "must say what is wrong" in judge_scene(asking, plan()).reason
    assert (
        "must name mug_blue"
        in judge_scene(asking, plan(needs_clarification="mug_red or mug_blues?")).reason
    )
    other = "[mug_red] or [my_mug_blue]?"
    assert "must name mug_blue" in judge_scene(asking, plan(needs_clarification=other)).reason
    assert (
        "steps must be empty"
        in judge_scene(asking, plan(pick("nut"), needs_clarification=question)).reason
    )


def test_a_failed_step_changes_nothing() -> None:
    world = World(TABLE)
    before = (dict(world.where), dict(world.holding))
    assert world.apply(PlanStep("pick", {"object": "mug"})) is not None
    assert (world.where, world.holding) == before
