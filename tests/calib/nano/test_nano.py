"""planner-nano, built and run like any other model: validity, acceptance and speed on held-out
tasks; and how the measuring scripts compute their figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from thor_dflash.builders.build import build
from thor_dflash.calib.demo import MODEL
from thor_dflash.calib.planbench import FAMILIES, Task
from thor_dflash.calib.studies import script
from thor_dflash.calib.studies.heldout import (
    TaskResult,
    accept_length,
    plan,
    speed_up,
)
from thor_dflash.config.build import BuildConfig
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.progress import Silent
from thor_dflash.runtime.session import Session, open_session

TASKS = 36
"""How many of the 120 held-out tasks the complete suite runs; the quick one runs the shortest two.
Families alternate in them. docs/performance has the results of all.
"""


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    package = tmp_path_factory.mktemp("nano") / "package"
    build(MODEL / "target", MODEL / "drafter", package, BuildConfig(), Silent())
    with closing(open_session(package, EngineConfig(threads=1), Silent())) as opened:
        yield opened


@pytest.mark.slow
def test_the_dflash2_drafter_accepts_nearly_whole_blocks(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """A wrong convolution, walk or mask costs acceptance, and nothing else shows it."""
    package = tmp_path_factory.mktemp("second") / "package"
    build(MODEL / "target", MODEL / "drafter2", package, BuildConfig(), Silent())
    with closing(open_session(package, EngineConfig(threads=1), Silent())) as opened:
        assert opened.manifest.block == 8
        some = sorted(script.tasks(TASKS), key=length)[:6]
        made = [plan(opened, task, thinking=True, plain=False) for task in some]
    assert all(one.valid for one in made)
    assert accept_length(made) >= 7


@pytest.fixture(scope="module", params=["short", pytest.param("many", marks=pytest.mark.slow)])
def results(session: Session, request: pytest.FixtureRequest) -> list[TaskResult]:
    # Plain decoding takes a cycle for every token: it answers only the shortest tasks.
    some = script.tasks(TASKS)
    if request.param == "short":
        return [plan(session, t, thinking=True, plain=False) for t in sorted(some, key=length)[:2]]
    short = {task.family: task for task in sorted(some, key=length, reverse=True)}
    return [plan(session, t, thinking=True, plain=t is short[t.family]) for t in some]


def length(task: Task) -> int:
    """Returns how many characters the task's canonical thinking and plan have."""
    return len(task.thinking) + len(task.plan)


def test_held_out_plans_reach_their_goals(results: list[TaskResult]) -> None:
    failed = [(r.task.name, r.reason) for r in results if not r.valid]
    assert len(failed) <= 0.05 * len(results), failed


def test_held_out_accept_length(results: list[TaskResult]) -> None:
    assert accept_length(results) >= 5
    families = {r.task.family for r in results}
    assert len(results) < TASKS or families == set(FAMILIES)
    for family in families:
        assert accept_length(r for r in results if r.task.family == family) >= 5


@pytest.mark.parametrize("results", [pytest.param("many", marks=pytest.mark.slow)], indirect=True)
def test_speculation_is_exact_and_at_least_twice_as_fast(results: list[TaskResult]) -> None:
    # `plan` itself compares the tokens of both ways of decoding.
    assert speed_up([r for r in results if r.plain]) >= 2


def test_without_thinking_it_answers_at_once(results: list[TaskResult], session: Session) -> None:
    result = plan(session, results[0].task, thinking=False, plain=False)
    assert result.valid, result.reason
    assert len(result.tokens) < len(results[0].tokens)


def test_padding_of_the_vocabulary_is_never_chosen(
    results: list[TaskResult], session: Session
) -> None:
    assert session.manifest.vocab_limit < session.manifest.target.vocab
    assert max(t for r in results for t in r.tokens) < session.manifest.vocab_limit
