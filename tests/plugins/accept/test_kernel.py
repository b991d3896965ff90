"""accept's kernel against the reference, on random blocks that combine many hard cases."""

from __future__ import annotations

import numpy as np
import pytest
from emulator.compiler import COMPILER
from emulator.runner import Emulator
from support.kernel_runner import call_of, launch
from support.op_cases import OpCase, accept_case, any_accept_case

from thor_dflash.core.tensors import Array
from thor_dflash.plugins.accept import OP, Record
from thor_dflash.plugins.head.argmax_launch import SLICE

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ (Debian package g++)")

WIDTHS = (1, 2, 7, 40, 333, 1280, SLICE - 1, SLICE, SLICE + 1, SLICE + 4, 2 * SLICE + 37)
"""Vocabularies of one slice and of several; rows that are 16-byte aligned and rows that are not."""


def record(case: OpCase, seed: int = 0) -> Array:
    """The record that the kernel writes, with the emulator's order of threads given by `seed`."""
    return launch(call_of(OP, case), Emulator(seed=seed))["record"]


def reference(case: OpCase) -> Array:
    return OP.reference(case.inputs, OP.complete(case.attributes))["record"]


@pytest.mark.parametrize(
    "seeds", [range(40), pytest.param(range(40, 200), marks=pytest.mark.slow)], ids=["few", "more"]
)
def test_the_record_equals_the_references_on_random_blocks(seeds: range) -> None:
    for seed in seeds:
        case = any_accept_case(seed, WIDTHS, SLICE)
        np.testing.assert_array_equal(record(case, seed), reference(case), f"seed {seed}")


@pytest.mark.parametrize("rule", [1, 2])
@pytest.mark.parametrize("at", [0, 5, SLICE - 1, SLICE, 2 * SLICE + 3])
def test_rank_counts_every_slice(rule: int, at: int) -> None:
    """A draft's rank is the number of ids with a larger logit, or an equal one and a smaller id."""
    logits = np.zeros((2, 2 * SLICE + 8))
    logits[0, 2 * SLICE + 7] = 0.25
    for top_k in (at + 1, at + 2):
        case = accept_case("rank", logits, np.array([0, at]), rule=rule, top_k=top_k, margin=1.0)
        assert Record.read(record(case)).relaxed == int(top_k > at + 1)


@pytest.mark.parametrize(("draft", "relaxed"), [(1.0, 1), (0.99999994, 0)])
def test_a_draft_exactly_at_the_margin_is_accepted(draft: float, relaxed: int) -> None:
    logits = np.array([[-9, draft, 1.5, -9]] * 2)
    case = accept_case("edge", logits, np.array([0, 1]), rule=1, top_k=4, margin=0.5)
    assert Record.read(record(case)).relaxed == relaxed


@pytest.mark.parametrize("width", [64, SLICE + 64, 34 * SLICE])
def test_a_probability_is_of_all_allowed_ids(width: int) -> None:
    """The best id has e times the draft's probability, as all others have the draft's. So
    p(best) - p(draft) is (e - 1) / (e + width - 1).
    """
    logits = np.zeros((2, width))
    logits[0, width - 1] = 1.0
    gap = (np.e - 1) / (np.e + width - 1)
    for margin in (gap * 0.9999, gap * 1.0001):
        case = accept_case("gap", logits, np.array([0, 3]), rule=2, top_k=width, margin=margin)
        assert Record.read(record(case)).relaxed == int(margin > gap)


@pytest.mark.parametrize("rule", [0, 1, 2])
def test_a_rows_choice_does_not_depend_on_other_rows(rule: int) -> None:
    rng = np.random.default_rng(3)
    logits = np.round(rng.standard_normal((16, 1280)) * 4)
    tokens = np.concatenate([[0], logits.argmax(axis=1)[:-1]])
    alone = [
        Record.read(record(accept_case("alone", row[None], np.zeros(1), rule=rule))).choices[0]
        for row in logits
    ]
    together = Record.read(record(accept_case("together", logits, tokens, rule=rule)))
    assert list(together.choices) == alone
    assert together.count == 16


def test_a_row_may_have_more_slices_than_a_warp_has_lanes() -> None:
    logits = np.zeros((2, 34 * SLICE))
    logits[0, 33 * SLICE] = 0.5
    logits[1, 5], logits[1, 9 * SLICE] = np.nan, 1.0
    ahead = 33 * SLICE  # ids that rank before the draft: the best one, and all smaller ids
    for top_k in (ahead, ahead + 1):
        case = accept_case(
            "lanes", logits, np.array([0, 33 * SLICE - 1]), rule=1, top_k=top_k, margin=1.0
        )
        got = Record.read(record(case))
        assert got.choices == (33 * SLICE, -1)
        assert got.relaxed == int(top_k > ahead)


@pytest.mark.parametrize(
    ("rule", "last", "temperature", "relaxed"),
    [
        (1, 1, 1.0, 0),  # 1.5 nats from the best, at a margin of 1
        (1, 1, 2.0, 1),  # 0.75 nats at this temperature
        (1, 0, 2.0, 0),  # the draft ranks after the last that could be drawn
        (2, 1, 1.0, 0),  # 0.82 - 0.18 of what could be drawn, at a margin of 0.5
        (2, 1, 2.0, 1),  # 0.68 - 0.32
        (2, 0, 2.0, 0),
    ],
)
def test_relaxed_rules_see_what_could_be_drawn(
    rule: int, last: int, temperature: float, relaxed: int
) -> None:
    logits = np.array([[2.0, 0.5, -1.0, -9.0]] * 2)
    margin = {1: 1.0, 2: 0.5}[rule]
    case = accept_case("drawn", logits, np.array([0, 1]), rule=rule, top_k=4, margin=margin)
    more = {
        "sampled": np.array([0, 0], np.int32),
        "last": np.full(2, last, np.int32),
        "temperature": np.array([temperature], np.float32),
    }
    case = OpCase(case.name, {**case.inputs, **more}, case.attributes)
    assert Record.read(reference(case)).relaxed == relaxed
    assert Record.read(record(case)).relaxed == relaxed
