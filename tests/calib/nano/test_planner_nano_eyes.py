"""planner-nano-eyes, the model in the repository that sees: its plans by the picture, the laws on
real weights, and its files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import mean

import numpy as np
import pytest
from PIL import Image
from support.planner_eyes import EYES, eyes_session

from thor_dflash.calib import pictured_files
from thor_dflash.calib.pictured_files import pairs
from thor_dflash.calib.plan_requests import answer_of, tokens_of
from thor_dflash.calib.planbench import judge
from thor_dflash.calib.planbench.drawing import SIDE
from thor_dflash.calib.planbench.pictured import (
    SHOWN,
    PicturedTask,
    Shown,
    heldout_pictured,
    shown_picture,
)
from thor_dflash.calib.studies.pictures import request_of
from thor_dflash.runtime.decoding.proposers import DflashDrafter, NoDrafter, Proposer
from thor_dflash.runtime.session import Request, Session
from thor_dflash.runtime.session.turn_cache import Conversation, TurnCache
from thor_dflash.runtime.vision.picture import PixelLimits

EXAMPLES = EYES / "examples"
TEXT = 128
"""Tokens of a prompt before the picture, in whole chunks."""


@pytest.fixture
def s() -> Session:
    """A session in which nothing was asked yet."""
    found = eyes_session()
    forget(found)
    return found


def forget(s: Session) -> None:
    s.turns = TurnCache(s.model)
    s.model.state.log.chunks.clear()


def asked(s: Session, pictured: PicturedTask) -> Request:
    """A task with its picture, as a turn that later ones may continue, also within the text."""
    request = request_of(s, pictured, pictured.drawn.pixels)
    boundaries = Conversation(boundaries=((TEXT, "user"), (len(request.prompt), "prompt")))
    return replace(request, conversation=boundaries)


def plans(s: Session, pictured: PicturedTask, tokens: Sequence[int]) -> bool:
    """Whether an answer's plan reaches the goal of the task's scene."""
    prompt = request_of(s, pictured, pictured.drawn.pixels).prompt
    return judge(pictured.task, answer_of(s, prompt, tokens)).valid


def begun(s: Session, request: Request, count: int, proposer: Proposer) -> tuple[int, ...]:
    """The first tokens of an answer."""
    return tokens_of(s.run(replace(request, max_tokens=count), proposer))[:count]


def test_a_larger_square_is_resized_to_what_it_was_trained_on(s: Session) -> None:
    vision = s.manifest.vision
    assert vision is not None
    limits = PixelLimits(vision.shortest, vision.longest)
    assert [limits.resized(side, side) for side in (64, 640, 2000)] == 3 * [(SIDE, SIDE)]


def test_one_text_with_two_pictures_gets_two_right_plans(s: Session) -> None:
    """And the second turn, which reuses the text before the picture, gives the answer of an empty
    session.
    """
    first, second = next(pairs())
    answers = [tokens_of(s.run(asked(s, task), DflashDrafter())) for task in (first, second)]
    assert s.report().reuse.held == TEXT
    assert [plans(s, *pair) for pair in zip((first, second), answers, strict=True)] == [True] * 2
    assert not plans(s, second, answers[0])
    forget(s)
    # The pictures show where the answers differ.
    until = next(i for i, (a, b) in enumerate(zip(*answers, strict=False)) if a != b) + 1
    assert begun(s, asked(s, second), until, DflashDrafter()) == answers[1][:until]
    assert s.report().reuse.held == 0


def test_a_drafter_changes_no_token_of_an_answer_to_a_picture(s: Session) -> None:
    task = heldout_pictured(3)[2]
    assert task.task.family == "infeasible"
    answer = tokens_of(s.run(asked(s, task), DflashDrafter()))
    assert plans(s, task, answer)
    assert s.report().spec.accept_len > 4
    assert begun(s, asked(s, task), 20, NoDrafter()) == answer[:20]


@pytest.fixture(scope="module")
def tasks() -> list[PicturedTask]:
    return heldout_pictured(30 + 3)


@pytest.mark.slow
@pytest.mark.parametrize("shown", SHOWN)
def test_plans_are_valid_with_the_right_picture_alone(
    s: Session, tasks: list[PicturedTask], shown: Shown
) -> None:
    """The gate of 95 % with its own, and below 60 % with any other: that a request cannot be met
    shows in most texts, and a third of the tasks are such.
    """
    valid: list[bool] = []
    for index, pictured in enumerate(tasks[:-3]):
        request = request_of(s, pictured, shown_picture(tasks, index, shown))
        answer = answer_of(s, request.prompt, tokens_of(s.generate(request)))
        valid.append(judge(pictured.task, answer).valid)
    if shown == "its own":
        assert mean(valid) >= 0.95
    else:
        assert mean(valid) < 0.6


@pytest.mark.slow
def test_right_plans_for_both_pictures_of_a_text(s: Session) -> None:
    both = [
        [plans(s, task, tokens_of(s.generate(asked(s, task)))) for task in pair]
        for pair in islice(pairs(), 10)
    ]
    assert mean(map(all, both)) >= 0.9


@pytest.mark.slow
def test_answers_are_those_of_transformers(s: Session, tasks: list[PicturedTask]) -> None:
    """Greedy, in float32: made by calib.nano.reference."""
    wanted = json.loads((EYES / "transformers.json").read_text())["answers"]
    for pictured, tokens in zip(tasks, wanted, strict=False):
        assert list(tokens_of(s.generate(asked(s, pictured)))) == tokens


def test_the_examples_are_what_the_script_writes(tmp_path: Path) -> None:
    pictured_files.main(["--out", str(tmp_path)])
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == sorted(path.name for path in EXAMPLES.iterdir())
    for name in names:
        if name.endswith(".txt"):
            assert (tmp_path / name).read_text() == (EXAMPLES / name).read_text()
            continue
        # Compressed otherwise by other versions of Pillow.
        new, shipped = (np.asarray(Image.open(d / name)) for d in (tmp_path, EXAMPLES))
        assert np.array_equal(new, shipped)
