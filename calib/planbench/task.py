"""Tasks: drawn from a seed, stored as one JSON line, judged from that line alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from thor_dflash.calib.planbench.families import DRAFTS, Draft, Rejected
from thor_dflash.calib.planbench.judge import Verdict, judge_scene
from thor_dflash.calib.planbench.render import SYSTEM
from thor_dflash.calib.planbench.scene import Goal, Scene, scene_from_json, scene_to_json
from thor_dflash.calib.planbench.words import held_out

Split = Literal["train", "heldout"]

FAMILIES = tuple(DRAFTS)
"""Family names, in the order in which held-out tasks alternate."""


@dataclass(frozen=True)
class Task:
    """One planning task with its canonical answer and the scene that judges any answer."""

    name: str
    family: str
    split: str
    messages: tuple[tuple[str, str], ...]
    """(role, content): one system and one user message."""
    thinking: str
    plan: str
    """The canonical plan, compact JSON."""
    scene: Scene
    template: str
    """The request with every name replaced; no template is in both splits."""
    goal_key: str
    """The combination of destinations; none is in both splits."""


def sample(family: str, seed: int | str, split: Split) -> Task:
    """Draw one task. The same arguments give the same task on every machine.

    Raises:
        ValueError: the family is unknown.
    """
    if family not in DRAFTS:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)} (got {family})")
    rng = Random(f"planbench/{split}/{family}/{seed}")
    held = split == "heldout"
    while True:
        try:
            draft = DRAFTS[family](rng, held)
        except Rejected:
            continue
        if held_out(goal_key(draft.request_goals), 4) == held:
            return task_of(f"{family}/{seed}", family, split, draft)


def heldout(count: int) -> list[Task]:
    """Return the first held-out tasks, alternating the families."""
    return [
        sample(FAMILIES[i % len(FAMILIES)], i // len(FAMILIES), "heldout") for i in range(count)
    ]


def judge(task: Task, plan_text: str) -> Verdict:
    """Judge any plan text for a task; any correct plan is accepted."""
    return judge_scene(task.scene, plan_text)


def goal_key(goals: tuple[Goal, ...]) -> str:
    """Summarise goals without the objects moved: kinds, destinations and switched things, in
    order.
    """
    return "|".join(f"{g.kind}:{g.where if g.kind == 'at' else g.subject}" for g in goals)


def task_to_line(task: Task) -> str:
    """Convert a task to one line of JSON."""
    fields = {
        "name": task.name,
        "family": task.family,
        "split": task.split,
        "messages": [{"role": role, "content": content} for role, content in task.messages],
        "thinking": task.thinking,
        "plan": task.plan,
        "scene": scene_to_json(task.scene),
        "template": task.template,
        "goal_key": task.goal_key,
    }
    return json.dumps(fields, separators=(",", ":"))


def task_from_line(line: str) -> Task:
    """The inverse of ``task_to_line``."""
    data: dict[str, Any] = json.loads(line)
    return Task(
        data["name"],
        data["family"],
        data["split"],
        tuple((m["role"], m["content"]) for m in data["messages"]),
        data["thinking"],
        data["plan"],
        scene_from_json(data["scene"]),
        data["template"],
        data["goal_key"],
    )


def task_of(name: str, family: str, split: Split, draft: Draft) -> Task:
    """Give a drawn task its name."""
    messages = (("system", SYSTEM), ("user", draft.prompt))
    key = goal_key(draft.request_goals)
    return Task(
        name, family, split, messages, draft.thinking, draft.plan, draft.scene, draft.template, key
    )
