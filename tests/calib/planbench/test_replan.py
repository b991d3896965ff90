"""A plan that fails half way: `again` makes the task that is left in the world as it then is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from thor_dflash.calib.planbench import Task, judge, task_from_line
from thor_dflash.calib.planbench.executor import PlanStep
from thor_dflash.calib.planbench.planner import plan_steps
from thor_dflash.calib.planbench.replan import again

HELDOUT = Path(__file__).parents[3] / "models/planner-nano/heldout.jsonl"
TASKS = [task_from_line(line) for line in HELDOUT.read_text().splitlines()]
BEHIND_DOORS = next(task for task in TASKS if task.name == "mobile/1")


def written(steps: list[PlanStep]) -> str:
    listed = [
        {"id": i, "skill": step.skill, "args": step.args, "on_fail": "replan"}
        for i, step in enumerate(steps, 1)
    ]
    return json.dumps({"goal": "", "steps": listed, "needs_clarification": None})


def test_the_rest_is_asked_of_the_world_as_it_then_is() -> None:
    """A plan as planner-nano makes it for this task: it opens the wrong door first."""
    wrong = [PlanStep("open", {"target": "lab_door"}), PlanStep("goto", {"place": "sink"})]
    rest = again(BEHIND_DOORS, written(wrong))
    assert rest
    assert rest.scene == replace(BEHIND_DOORS.scene, opened=("lab_door",))
    (_, before), (_, after) = BEHIND_DOORS.messages[1], rest.messages[1]
    assert after == before.replace("lab_door closed", "lab_door open")
    assert judge(rest, written(plan_steps(rest.scene))).valid


def test_wherever_a_plan_stops_the_rest_can_be_planned() -> None:
    """Cuts the canonical plan of every feasible task after each step but the last."""
    acting: list[Task] = [task for task in TASKS if not task.scene.must_ask]
    for task in acting:
        steps = plan_steps(task.scene)
        for cut in range(1, len(steps)):
            rest = again(task, written(steps[:cut]))
            assert rest, task.name
            assert judge(rest, written(steps[cut:])).valid, task.name
            assert rest.messages[1][1].endswith(task.messages[1][1].partition("\nRequest")[2])
    assert len(acting) > 90
