"""Schemas of plans: what a robot can do is allowed, what it cannot is not, and nano's plans fit."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.constrained_model import session, text

from thor_dflash.calib.planbench.task import FAMILIES, Task, sample
from thor_dflash.calib.studies.grammar_quality import schema_of
from thor_dflash.core.errors import RequestError
from thor_dflash.runtime.grammar.schema import read
from thor_dflash.serving.planner.plan_schema import Schema, from_skills
from thor_dflash.serving.planner.schema_validator import SchemaValidator

IDS = {"object": ["mug", "cup"], "place": ["tray"]}
SKILLS = {"pick": {"object": "object"}, "place": {"object": "object", "on": "place"}}


def step(number: int = 1, skill: str = "pick", **args: str) -> dict[str, Any]:
    return {"id": number, "skill": skill, "args": args or {"object": "mug"}, "on_fail": "retry"}


def plan(*steps: dict[str, Any], asks: str | None = None) -> dict[str, Any]:
    return {"goal": "g", "steps": list(steps), "needs_clarification": asks}


def takes(made: Schema, value: object) -> bool:
    """Whether the grammar takes a plan; an independent validator must agree."""
    grammar = session().grammar(made)
    matcher = grammar.matcher.deep_copy()
    tokens = text().encode(json.dumps(value, separators=(",", ":"), ensure_ascii=False))
    taken = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
    assert SchemaValidator(read(made)).valid(value) == taken, value
    return taken


@pytest.mark.parametrize(
    ("value", "good"),
    [
        (plan(step()), True),
        (plan(step(), step(2, "place", object="cup", on="tray")), True),
        (plan(asks="Which mug?"), True),
        (plan(), True),
        (plan(step(), asks="Which mug?"), False),
        (plan(step(2)), False),
        (plan(step(object="fork")), False),
        (plan(step(1, "place", object="mug")), False),
        (plan({**step(), "why": "x"}), False),
        (plan(*(step(i) for i in range(1, 5))), False),
        ({**plan(step()), "goal": "g" * 121}, False),
    ],
)
def test_what_is_a_plan(value: object, good: bool) -> None:
    assert takes(from_skills(SKILLS, IDS, max_steps=3), value) == good


def test_expectations_and_arguments_of_their_own_kind() -> None:
    seconds = {"type": "integer", "minimum": 1, "maximum": 60}
    made = from_skills({"wait": {"s": seconds}}, {}, expect=20, on_fail=("skip",))
    good = {"id": 1, "skill": "wait", "args": {"s": 5}, "expect": "it is dry", "on_fail": "skip"}
    assert takes(made, plan(good))
    assert not takes(made, plan({**good, "args": {"s": 61}}))
    assert not takes(made, plan({**good, "expect": "x" * 21}))


def test_a_skill_without_anything_to_do_it_with_is_left_out() -> None:
    made = from_skills(SKILLS, {"object": ["mug"], "place": []})
    assert takes(made, plan(step()))
    assert not takes(made, plan(step(1, "place", object="mug", on="tray")))
    with pytest.raises(RequestError, match=r"skills must have one that is possible here"):
        from_skills(SKILLS, {"object": [], "place": []})
    with pytest.raises(RequestError, match=r'skills.pick.object must be .* \(got "object"\)'):
        from_skills(SKILLS, {"place": ["tray"]})
    with pytest.raises(RequestError, match=r"max_steps must be >= 1 \(got 0\)"):
        from_skills(SKILLS, IDS, max_steps=0)


def test_a_text_is_no_list_of_texts() -> None:
    with pytest.raises(RequestError, match=r'^ids.object must be a list of texts \(got "beck"\)'):
        from_skills(SKILLS, {**IDS, "object": "beck"})


@pytest.mark.parametrize("name", ["a/b", "a~b", "a b", 'quote"', "ü", "%41", "a.b", "#"])
def test_any_name_is_a_name(name: str) -> None:
    made = from_skills({name: {name: name}}, {name: [name]}, max_steps=1)
    assert takes(made, plan({"id": 1, "skill": name, "args": {name: name}, "on_fail": "skip"}))


def canonical(task: Task) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(task.plan)
    return value


@settings(max_examples=30)
@given(family=st.sampled_from(FAMILIES), seed=st.integers(0, 10**6), held=st.booleans())
@pytest.mark.slow
def test_plans_that_nano_was_trained_on_fit_word_for_word(
    family: str, seed: int, held: bool
) -> None:
    task = sample(family, seed, "heldout" if held else "train")
    made, value = schema_of(task.scene), canonical(task)
    assert json.dumps(value, separators=(",", ":"), ensure_ascii=False) == task.plan
    assert takes(made, value)
