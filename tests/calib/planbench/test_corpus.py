"""The generator of planning tasks: it is deterministic, training and held-out tasks do not overlap,
canonical plans are valid and mutated ones are not.
"""

from __future__ import annotations

import json
import re

import pytest

from thor_dflash.calib.planbench import (
    FAMILIES,
    Task,
    heldout,
    judge,
    sample,
    task_to_line,
)
from thor_dflash.calib.planbench.words import noun_is_held_out, noun_of

PER_FAMILY = 50


@pytest.fixture(scope="module")
def train() -> list[Task]:
    return [sample(family, seed, "train") for family in FAMILIES for seed in range(PER_FAMILY)]


@pytest.fixture(scope="module")
def held() -> list[Task]:
    return heldout(PER_FAMILY * len(FAMILIES))


def test_every_canonical_plan_is_valid(train: list[Task], held: list[Task]) -> None:
    for task in train + held:
        assert judge(task, task.plan).valid, (task.name, judge(task, task.plan).reason)


def test_the_same_seed_gives_the_same_task() -> None:
    for family in FAMILIES:
        assert task_to_line(sample(family, 7, "train")) == task_to_line(sample(family, 7, "train"))
        assert sample(family, 7, "train") != sample(family, 8, "train")
        assert sample(family, 7, "train").messages != sample(family, 7, "heldout").messages


def test_templates_and_goal_combinations_do_not_overlap(
    train: list[Task], held: list[Task]
) -> None:
    assert {t.template for t in train}.isdisjoint(t.template for t in held)
    assert {t.goal_key for t in train}.isdisjoint(t.goal_key for t in held)


def nouns(task: Task) -> set[str]:
    """Returns the nouns of all objects of a task: those in the scene and those in the request."""
    named = {noun_of(name) for name, _ in task.scene.objects}
    quoted = {
        noun_of(name)
        for name in re.findall(r'"([a-z_]+)"', task.messages[1][1].split("Request:")[1])
    }
    places = {p.name for p in task.scene.places} | {f"{room}_door" for room in task.scene.doors}
    return named | {n for n in quoted if n not in {noun_of(p) for p in places}}


def test_object_nouns_do_not_overlap(train: list[Task], held: list[Task]) -> None:
    assert not any(noun_is_held_out(noun) for task in train for noun in nouns(task))
    assert all(noun_is_held_out(noun) for task in held for noun in nouns(task))


def test_infeasible_tasks_want_a_question(train: list[Task]) -> None:
    for task in train:
        plan = json.loads(task.plan)
        infeasible = task.family == "infeasible"
        assert bool(task.scene.must_ask) == infeasible
        assert (plan["steps"] == []) == infeasible
        assert (plan["needs_clarification"] is not None) == infeasible


def test_dropping_a_needed_step_is_noticed(train: list[Task]) -> None:
    dropped = caught = 0
    for task in train:
        plan = json.loads(task.plan)
        for index, step in enumerate(plan["steps"]):
            if step["skill"] not in ("pick", "place", "handover"):
                continue
            rest = plan["steps"][:index] + plan["steps"][index + 1 :]
            for number, row in enumerate(rest, start=1):
                row["id"] = number
            dropped += 1
            caught += not judge(task, json.dumps({**plan, "steps": rest})).valid
    assert dropped > 500
    assert caught == dropped


def test_swapping_pick_and_place_is_noticed(train: list[Task]) -> None:
    swapped = 0
    for task in train:
        plan = json.loads(task.plan)
        steps = plan["steps"]
        index = next((i for i, s in enumerate(steps[:-1]) if s["skill"] == "pick"), None)
        if index is None:
            continue
        for key in ("skill", "args"):
            steps[index][key], steps[index + 1][key] = steps[index + 1][key], steps[index][key]
        if steps[index]["skill"] in ("place", "handover"):
            swapped += 1
            assert not judge(task, json.dumps(plan)).valid
    assert swapped > 100
