"""Relaxed thinking: which drafts each rule accepts, and in which part of an answer it applies."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from support.loop_models import erring
from support.op_cases import accept_case
from support.thinking_models import Asked, after, run

from thor_dflash.plugins.accept.record import LOG_MARGIN, PROBABILITY_DELTA, STRICT, Record
from thor_dflash.plugins.accept.reference import reference
from thor_dflash.plugins.contract import Attributes
from thor_dflash.runtime.decoding.block import AcceptRule, Block, DecodeProgress
from thor_dflash.runtime.decoding.proposers import CallableDrafter
from thor_dflash.runtime.policies.relaxed_acceptance import RelaxedThinking

NEVER = 511
ANYTHING = AcceptRule(rule=LOG_MARGIN, top_k=512, margin=1e9, close=NEVER)


def accepted(logits: list[float], draft: int, **given: float) -> bool:
    """Whether a draft after a row with these logits is committed."""
    rows = np.array([logits, logits], np.float32)
    case = accept_case("one", rows, np.array([0, draft]), **given)
    record = Record.read(reference(case.inputs, Attributes(case.attributes))["record"])
    assert record.count == 1 + record.agreed
    assert record.relaxed == (record.agreed == 1 and draft != int(np.argmax(logits)))
    return record.agreed == 1


LOGITS = [2.0, 3.0, 2.5, 3.0, -1.0]
"""Ids from best to worst: 1, 3 (a tie: the lower id first), 2, 0, 4."""


@pytest.mark.parametrize(
    ("k", "margin", "takes"),
    [
        (3, 1.0, {1, 3, 2}),
        (4, 1.0, {1, 3, 2, 0}),  # id 0 is exactly the margin behind the best: 3.0 - 2.0
        (4, np.nextafter(np.float32(1), np.float32(0)), {1, 3, 2}),
        (2, 1.0, {1, 3}),
        (1, 9.0, {1}),
        (5, 0.5, {1, 3, 2}),
        (5, 9.0, {0, 1, 2, 3, 4}),
        (5, 0.0, {1}),  # a margin of 0 is strict: not even a tie with the best is accepted
    ],
)
def test_margin_rule(k: int, margin: float, takes: set[int]) -> None:
    given = {"rule": LOG_MARGIN, "top_k": k, "margin": float(margin)}
    assert {d for d in range(5) if accepted(LOGITS, d, **given)} == takes


LIKELY = list(np.log([0.125, 0.5, 0.125, 0.25]))


@pytest.mark.parametrize(
    ("k", "delta", "takes"),
    [
        (10, 0.6, {0, 1, 2, 3}),  # the best probability minus delta is below 0: all pass
        (10, 0.26, {1, 3}),
        (10, 0.24, {1}),
        (10, 0.376, {0, 1, 2, 3}),
        (3, 0.376, {1, 3, 0}),
        (2, 0.376, {1, 3}),
        (1, 0.6, {1}),
        (10, 0.0, {1}),
    ],
)
def test_delta_rule(k: int, delta: float, takes: set[int]) -> None:
    given = {"rule": PROBABILITY_DELTA, "top_k": k, "margin": delta}
    assert {d for d in range(4) if accepted(LIKELY, d, **given)} == takes


@pytest.mark.parametrize("rule", [STRICT, LOG_MARGIN, PROBABILITY_DELTA])
def test_stop_and_strict_ids_are_never_near(rule: int) -> None:
    for name in ("stop", "strict"):
        given = {"rule": rule, "top_k": 5, "margin": 9.0, name: 2}
        assert not accepted(LOGITS, 2, **given)


# --- where


def wild(seed: int, close_at: int | None = None) -> CallableDrafter:
    """Random drafts; the one at `close_at`, if given, is the closing mark."""

    def guess(progress: DecodeProgress) -> list[int]:
        rng = np.random.default_rng((seed, len(progress.tokens)))
        made = [int(t) for t in rng.integers(0, 240, 15)]
        if close_at is not None:
            made[close_at] = NEVER
        return made

    return CallableDrafter(guess)


def answer_of(tokens: list[int], close: int) -> int:
    """Where the answer begins."""
    return tokens.index(close) + 1 if close in tokens else len(tokens)


def test_thinking_takes_what_strict_would_not() -> None:
    it = Asked(NEVER)
    got, report = run(it, wild(1), [RelaxedThinking(ANYTHING)])
    assert report.spec.cycles == 4, "60 tokens of 16 a block"
    assert report.phases["thinking"].relaxed > 40
    assert ("relaxed", "thinking", 0, 4) in {
        (n.what, n.why, n.cycle, n.cycles) for n in report.notes
    }
    assert got != after(it.prompt, 60)


@pytest.mark.parametrize("at", [0, 1, 7, 14])
def test_rows_from_a_drafted_close_on_are_strict(at: int) -> None:
    """So is the mark's own row: the target chose another token, so the mark is not committed."""
    it = Asked(NEVER, max_tokens=16)
    got, report = run(it, wild(at, close_at=at), [RelaxedThinking(ANYTHING)])
    assert NEVER not in got
    assert report.spec.accept_hist[at] >= 1
    assert report.spec.accept_hist[at + 1 :] == (0,) * (15 - at)


@cache
def natural(at: int) -> tuple[int, list[int]]:
    """An id that the model says first at `at` or soon after, to be the closing mark; and the
    model's answer to the prompt with that mark.
    """
    truth = after(Asked(NEVER).prompt, 120)
    index = next(i for i in range(at, 100) if truth[i] not in truth[:i])
    it = Asked(truth[index])
    return truth[index], after(it.prompt, 60)


@pytest.mark.parametrize("at", [0, 5, 16])
def test_the_answer_is_exact_given_the_thoughts(at: int) -> None:
    close, truth = natural(at)
    it = Asked(close)
    # So wide a margin that some wrong drafts are near misses, in the answer as in the thoughts.
    relaxed = AcceptRule(rule=LOG_MARGIN, top_k=512, margin=4.0, close=close)
    for seed in range(3):
        got, _ = run(it, erring(truth, 0.3, seed), [RelaxedThinking(relaxed)])
        start = answer_of(got, close)
        want = after([*it.prompt, *got[:start]], 60 - start) if start < 60 else []
        assert got[start:] == want


def test_committed_tokens_decide_the_phase() -> None:
    progress = DecodeProgress((1, 241), Asked(NEVER).marks)
    policy = RelaxedThinking(ANYTHING)
    block = Block(cap=16)
    assert policy.shape(progress, block).relaxed == ANYTHING
    assert policy.shape(progress, block.forcing([5], "x")).relaxed.rule == STRICT
    assert policy.shape(progress, block.undrafted("x")).relaxed.rule == STRICT
    progress.commit([5, NEVER])
    assert policy.shape(progress, block) is block
    again = DecodeProgress((1,), Asked(NEVER).marks)
    assert policy.shape(again, block) is block
    again.commit([241])
    assert policy.shape(again, block).relaxed == ANYTHING
