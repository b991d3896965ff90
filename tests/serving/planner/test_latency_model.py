"""The predicted cost of steps and plans: one slow step changes nothing, and a machine that was slow
is trusted again.
"""

from __future__ import annotations

from typing import Any

import pytest

from thor_dflash.config.serving import ServeConfig
from thor_dflash.core.errors import PlanError
from thor_dflash.serving.client import PlanRequest
from thor_dflash.serving.planner.latency_model import FIRST_STEP, KEPT, TRIAL, LatencyModel
from thor_dflash.serving.planner.mock_backend import MockBackend
from thor_dflash.serving.planner.planner import LocalPlanner, check_deadline


def measured() -> LatencyModel:
    rates = LatencyModel(step_sizes=(16, 64))
    for _ in range(KEPT):
        rates.cycle(95.0, 4, thinking=False)
        rates.cycle(95.0, 3, thinking=True)
        rates.step(50.0, 64)
        rates.plan(4000.0, 150)
    rates.accepted(tokens=160, cycles=40)
    return rates


def predicted(rates: LatencyModel) -> list[float]:
    return [
        rates.min_ms(640, 512, whole=False),
        rates.min_ms(640, 512, whole=True),
        rates.thinking_tokens_left(30_000.0, 640, 512),
        rates.e2e_ms,
    ]


def test_predictions_are_what_was_measured() -> None:
    rates = measured()
    assert predicted(rates)[:2] == [500 + 95 * 32 / 4, 500 + 95 * 150 / 4]
    assert LatencyModel().min_ms(640, 512, whole=True) == 0, "nothing is known yet"
    assert rates.e2e_ms == 4000.0
    half = LatencyModel()
    for tokens in (1, 1, 1, 9):
        half.cycle(10.0, tokens, thinking=False)
    assert half.answer_len == 3, "what four cycles commit is their sum"


def test_a_prompt_takes_whole_steps_and_one_as_small_as_its_rest_allows() -> None:
    rates = measured()
    rates.step(20.0, 16)
    assert [rates.prefill_ms(n) for n in (1, 2, 17, 18, 65, 66, 81, 82, 129, 131)] == [
        0, 20, 20, 50, 50, 70, 70, 100, 100, 120
    ]  # fmt: skip
    fresh = LatencyModel(step_sizes=(16, 32, 64))
    assert fresh.prefill_ms(71) == 0, "nothing is known yet"
    fresh.step(30.0, 32)
    assert fresh.prefill_ms(11) == 30, "no longer than the next size that has run"
    assert fresh.prefill_ms(65) == 0, "and of what is longer nothing is known"


def test_one_outlier_changes_nothing() -> None:
    rates = measured()
    before = predicted(rates)
    rates.cycle(3000.0, 4, thinking=False)
    rates.cycle(0.0, 3, thinking=True)
    rates.step(9000.0, 64)
    rates.plan(60_000.0, 4000)
    assert predicted(rates) == before
    assert rates.bound_ms() == 18_000, "but a cancel may have to wait for such a one"


def test_a_hard_prompt_refuses_nothing_that_an_easy_one_can_do() -> None:
    """Tokens per cycle differ by prompt: those of the last one say nothing about the next."""
    rates = measured()
    before = predicted(rates)
    for _ in range(200):  # 320 tokens at 1.6 a cycle
        rates.cycle(95.0, 2, thinking=False)
        rates.cycle(95.0, 1, thinking=False)
    rates.accepted(tokens=320, cycles=200)
    rates.plan(19_000.0, 320)
    assert predicted(rates)[:2] == before[:2]
    assert predicted(rates)[2] < before[2], "but an answer after thinking gets the time of such one"


@pytest.mark.parametrize("whole", [True, False])
def test_min_ms_is_the_time_of_the_best_answer_so_far(whole: bool) -> None:
    rates = LatencyModel(step_sizes=(64,))
    rates.step(50.0, 64)
    rates.cycle(100.0, 1, thinking=False)
    assert rates.min_ms(65, 512, whole=whole) == 150, "one cycle, until an answer was seen"
    rates.accepted(tokens=FIRST_STEP - 1, cycles=31)
    assert rates.min_ms(65, 512, whole=whole) == 150, "too short to tell"
    for answer, cycles in ((40, 20), (64, 16), (100, 50)):
        rates.accepted(answer, cycles)
        rates.plan(1.0, answer)
    assert rates.min_ms(65, 512, whole=whole) == 50 + 100 * (40 if whole else FIRST_STEP) / 4
    assert rates.min_ms(65, 8, whole=whole) == 50 + 100 * 8 / 4


def refused(rates: LatencyModel, times: int, left_ms: float = 700.0, *, free: bool = True) -> int:
    """How many of `times` plans are refused, each of which needs more time than it has."""
    codes: list[str] = []
    for _ in range(times):
        try:
            check_deadline(1260.0, left_ms, rates, spent_ms=0.0, free=free)
        except PlanError as e:
            codes.append(e.code)
    assert set(codes) <= {"deadline_infeasible"}
    return len(codes)


def test_after_enough_refusals_a_plan_is_taken_as_a_trial() -> None:
    rates = measured()
    assert refused(rates, TRIAL) == TRIAL - 1
    assert refused(rates, 1) == 0, "the trial may not have begun: so is the next one"
    rates.step(50.0, 64)
    assert refused(rates, TRIAL) == TRIAL - 1, "a step was measured"
    rates.cycle(95.0, 0, thinking=False)
    assert refused(rates, TRIAL) == TRIAL - 1


@pytest.mark.parametrize("local", [True, False])
def test_a_machine_that_was_slow_for_a_minute_is_trusted_again(house: Any, local: bool) -> None:
    backend = MockBackend(ServeConfig())
    backend.rates.cycle_ms = 1e7
    peer = None if local else house.peer(house.serve(backend))

    def ask(number: int) -> str:
        if peer:
            reply = peer.ask(op="plan", id=f"{number}", prompt="x", deadline_ms=60_000)
            return str(reply.get("code") or reply["status"])
        try:
            return LocalPlanner(backend).plan(PlanRequest(prompt="x", deadline_ms=60_000)).status
        except PlanError as e:
            return e.code

    written = [ask(number) for number in range(TRIAL + 2)]
    assert written == ["deadline_infeasible"] * (TRIAL - 1) + ["ok"] * 3
