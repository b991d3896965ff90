"""The judge: does a plan text parse, obey schema ``tdp.plan.v1``, run on the scene and reach the
goal?

Any correct plan is accepted, not only the canonical one.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, NoReturn, TypeGuard

from thor_dflash.calib.planbench.executor import PlanStep, World
from thor_dflash.calib.planbench.scene import ON_FAIL, SKILL_ARGS, Scene

MAX_TEXT = 16384
"""Characters; a longer text is refused before it is parsed."""
MAX_STEPS = 24
MAX_GOAL = 120
"""Characters of the "goal" field."""


@dataclass(frozen=True)
class Verdict:
    """Whether a plan is valid, and if not, the first reason found."""

    valid: bool
    reason: str


def judge_scene(scene: Scene, plan_text: str) -> Verdict:
    """Judge one plan text against a scene. Never raises, whatever the text is."""
    plan, reason = _parse(plan_text)
    if plan is None:
        return Verdict(False, reason)
    steps, reason = _steps(scene, plan)
    if steps is None:
        return Verdict(False, reason)
    question: str | None = plan["needs_clarification"]
    if scene.must_ask:
        return _judge_question(scene, steps, question)
    if question is not None:
        return Verdict(
            False, "needs_clarification must be null: the request can be done as it stands"
        )
    return _run(scene, steps)


def _run(scene: Scene, steps: list[PlanStep]) -> Verdict:
    world = World(scene)
    for number, step in enumerate(steps, start=1):
        failed = world.apply(step)
        if failed is not None:
            return Verdict(False, f"step {number} {step.skill}: {failed}")
    for goal in scene.goals:
        if not world.holds(goal):
            return Verdict(False, f"goal {goal.text()} must hold at the end")
    return Verdict(True, "")


def _judge_question(scene: Scene, steps: list[PlanStep], question: str | None) -> Verdict:
    if steps:
        return Verdict(
            False, f"steps must be empty when the request cannot be done (got {len(steps)})"
        )
    if question is None:
        return Verdict(False, "needs_clarification must say what is wrong (got null)")
    for name in scene.must_ask:
        if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", question) is None:
            return Verdict(False, f"needs_clarification must name {name}")
    return Verdict(True, "")


def _parse(text: str) -> tuple[dict[str, Any] | None, str]:
    if len(text) > MAX_TEXT:
        return None, f"plan must be at most {MAX_TEXT} characters (got {len(text)})"
    try:
        plan = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except RecursionError:
        return None, "plan must be JSON: nested too deeply"
    except ValueError as error:
        return None, f"plan must be JSON: {str(error)[:120]}"
    if not _is_object(plan):
        return None, f"plan must be an object (got {type(plan).__name__})"
    if set(plan) != {"goal", "steps", "needs_clarification"}:
        return (
            None,
            f"plan keys must be goal, steps, needs_clarification (got {_short(sorted(plan))})",
        )
    if not isinstance(plan["goal"], str) or len(plan["goal"]) > MAX_GOAL:
        return (
            None,
            f"goal must be a string of at most {MAX_GOAL} characters (got {_short(plan['goal'])})",
        )
    question = plan["needs_clarification"]
    if question is not None and not isinstance(question, str):
        return None, f"needs_clarification must be a string or null (got {_short(question)})"
    return plan, ""


def _steps(scene: Scene, plan: dict[str, Any]) -> tuple[list[PlanStep] | None, str]:
    listed: Any = plan["steps"]
    if not _is_array(listed) or len(listed) > MAX_STEPS:
        return None, f"steps must be an array of at most {MAX_STEPS} steps"
    steps: list[PlanStep] = []
    for number, item in enumerate(listed, start=1):
        step, reason = _step(scene, number, item)
        if step is None:
            return None, f"step {number}: {reason}"
        steps.append(step)
    return steps, ""


def _step(scene: Scene, number: int, item: Any) -> tuple[PlanStep | None, str]:
    if not _is_object(item) or set(item) != {"id", "skill", "args", "on_fail"}:
        return None, "keys must be id, skill, args, on_fail"
    if isinstance(item["id"], bool) or not isinstance(item["id"], int) or item["id"] != number:
        return None, f"id must be {number} (got {_short(item['id'])})"
    skill, args = item["skill"], item["args"]
    if not isinstance(skill, str) or skill not in SKILL_ARGS:
        return None, f"skill must be one of {', '.join(SKILL_ARGS)} (got {_short(skill)})"
    if not isinstance(item["on_fail"], str) or item["on_fail"] not in ON_FAIL:
        return None, f"on_fail must be one of {', '.join(ON_FAIL)} (got {_short(item['on_fail'])})"
    wanted = (("robot",) if len(scene.robots) > 1 else ()) + SKILL_ARGS[skill]
    if not _is_object(args) or set(args) != set(wanted):
        return None, f"args of {skill} must be {', '.join(wanted)} (got {_short(args)})"
    for name in wanted:
        if not isinstance(args[name], str):
            return None, f"args.{name} must be a string (got {_short(args[name])})"
    return PlanStep(skill, {name: args[name] for name in wanted}), ""


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("keys must not repeat")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"number must be finite (got {name})")


def _is_object(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def _is_array(value: Any) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def _short(value: Any) -> str:
    """Return at most 60 characters of a value; very long integers, which repr() refuses, are not
    shown.
    """
    if isinstance(value, int) and value.bit_length() > 256:
        return "a very long integer"
    try:
        return repr(value)[:60]
    except (ValueError, RecursionError):
        return type(value).__name__
