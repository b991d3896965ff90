"""The steps of a plan are found as soon as each is whole, and a plan that is cut anywhere keeps its
whole steps.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from thor_dflash.serving.planner.partial_json import StepStream, close_partial, read_object

words = st.text(st.characters(codec="utf-8"), max_size=6)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 99) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
steps = st.fixed_dictionaries({"id": st.integers(1, 9), "skill": words, "args": values})
plans = st.builds(
    lambda goal, steps, asks: {"goal": goal, "steps": steps, "needs_clarification": asks},
    words,
    st.lists(steps, max_size=4),
    st.none() | words,
)
styles = st.sampled_from([(",", ":"), (", ", ": ")])


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({min(place, len(text)) for place in places} | {0, len(text)})
    return [text[a:b] for a, b in pairwise(ends)]


@settings(max_examples=20)
@given(plan=plans, style=styles, places=st.lists(st.integers(0, 300)), raw=st.booleans())
def test_every_step_comes_once_whole_and_at_its_last_brace(
    plan: dict[str, Any], style: tuple[str, str], places: list[int], raw: bool
) -> None:
    text = json.dumps(plan, separators=style, ensure_ascii=raw)
    stream = StepStream()
    assert [step for piece in cut(text, places) for step in stream.feed(piece)] == plan["steps"]
    whole, ends = StepStream(), list[int]()
    for at, char in enumerate(text):
        ends += [at] * len(whole.feed(char))
    assert [text[at] for at in ends] == ["}"] * len(plan["steps"])
    for number, at in enumerate(ends, 1):
        assert json.loads(text[: at + 1] + "]}")["steps"] == plan["steps"][:number]
        assert StepStream().feed(text[:at]) == plan["steps"][: number - 1]


@given(plan=plans, style=styles, at=st.integers(0, 400))
def test_a_plan_cut_anywhere_is_whole_steps_or_nothing(
    plan: dict[str, Any], style: tuple[str, str], at: int
) -> None:
    text = json.dumps(plan, separators=style, ensure_ascii=False)
    piece = text[:at]
    kept, done = close_partial(piece), StepStream().feed(piece)
    if piece == text:
        assert kept == text
    elif not done:
        assert kept is None
    else:
        assert kept is not None
        want = {"goal": plan["goal"], "steps": done, "needs_clarification": None}
        assert json.loads(kept) == want
        assert list(json.loads(kept)) == list(want)


@example(text='{"steps":[{"a":1},{"b":NaN}')  # a whole step, which no drawn text is likely to hold
@given(text=st.text(st.sampled_from('{}[]",:\\abn1 \n') | st.characters(), max_size=60))
def test_no_text_breaks_it_and_nothing_broken_comes_of_it(text: str) -> None:
    for step in StepStream().feed(text):
        assert isinstance(step, dict)
        json.dumps(step, allow_nan=False, ensure_ascii=False).encode()
    kept = close_partial(text)
    assert kept is None or isinstance(json.loads(kept), dict)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ('{"goal":"a","steps":[{"id":1}],"needs_cl', {"steps": 1, "needs_clarification": None}),
        ('{"goal":"a","steps":[{"a":{"b":"]}"}},{', {"steps": 1, "needs_clarification": None}),
        ('\n{"actions":[{"go":1},', {"actions": 1}),
        ('{"goal":"a","steps":[{"id":1', None),
        ('[{"id":1},', None),
        ('{"steps":[{"id":NaN},', None),
        ('{"steps":[{"id":18446744073709551616},', None),
        ("[" * 100_000, None),
    ],
)
def test_examples(text: str, kept: dict[str, Any] | None) -> None:
    closed = close_partial(text)
    if kept is None:
        assert closed is None
        return
    assert closed is not None
    found = json.loads(closed)
    for key, value in kept.items():
        assert (len(found[key]) if isinstance(found[key], list) else found[key]) == value


@pytest.mark.parametrize(
    "value",
    ["NaN", "-Infinity", "1e999", "-1e999", "9" * 400 + ".0", "18446744073709551616",
     "-9223372036854775809", "9" * 5000, '"\\ud800"', '"\\udc00 "', '{"\\ud800":1}', '"\ud800"'],
    ids=lambda value: ascii(value[:24]),
)  # fmt: skip
def test_what_the_protocol_cannot_carry_is_not_read(value: str) -> None:
    assert read_object(f'{{"a":{value}}}') is None
    assert read_object(f'{{"a":[1,{{"b":{value}}}]}}') is None
    assert StepStream().feed(f'{{"steps":[{{"a":{value}}},{{"b":1}}]}}') == []
