"""The drafter's graphs equal the plain drafter of tests/plain, and differ from wrong drafters."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.checkpoints import DrafterGeometry
from support.coverings import some
from support.drafter_bench import (
    ANCHOR,
    FULL,
    SLIDING,
    DrafterBench,
    DrafterKind,
    decoding,
    distance,
    features,
    make_bench,
)
from support.reference_drafter import Rules

Array = NDArray[Any]

SAME = 1e-5
"""Largest difference from the plain drafter, relative to the largest logit."""
DIFFERENT = 1e-2
"""Least difference from a wrong drafter, in the same unit."""
BLOCK = 16


KINDS: dict[str, DrafterKind] = {
    "sliding, full": DrafterKind(),
    "27b's": DrafterKind(
        geometry=DrafterGeometry(
            layer_types=(SLIDING,) * 4 + (FULL,), heads=8, head_dim=16, taps=(0, 1, 2, 3)
        ),
        dialect="modelopt",
        target_dialect="modelopt",
    ),
    "window of one block": DrafterKind(
        geometry=DrafterGeometry(layer_types=(SLIDING, FULL, SLIDING), window=16, taps=(2,)),
        target="0.8b",
    ),
    "all full": DrafterKind(geometry=DrafterGeometry(layer_types=(FULL, FULL)), dialect="fp8"),
    "bidirectional": DrafterKind(changes=(("is_causal", False),)),
    "causal": DrafterKind(changes=(("is_causal", True),), dialect="compressed-tensors"),
}


@cache
def bench(name: str) -> DrafterBench:
    return make_bench(KINDS[name])


def one_by_one() -> Iterator[tuple[str, int]]:
    while True:
        yield "observe", 1


# With a window of 32 and 16 rows, row 15 first loses context row 0 at a context of 17, row 0 at 32.
# A sliding ring has 32 + CHUNK slots, so 240 rows go round it more than three times.
CONTEXTS = (0, 1, 15, 16, 17, 31, 32, 33, 48, 71, 72, 73, 145, 240)


@pytest.mark.parametrize("name", some([*KINDS], [*({*KINDS} - {"all full"})], pytest.mark.slow))
def test_logits_are_the_plain_drafters(name: str) -> None:
    b = bench(name)
    taps = features(b, max(CONTEXTS))
    for count in CONTEXTS:
        b.fill(taps[:count], decoding(prompt=count // 2, seed=count))
        tokens, got = b.propose()
        want = b.plain(taps[:count])
        assert distance(got, want) <= SAME, count
        assert tokens[0] == ANCHOR
        _check_choice(tokens, want)


def _check_choice(tokens: Array, want: Array) -> None:
    """The draft in row i must be the plain drafter's choice, or as good up to rounding."""
    for i in range(1, BLOCK):
        assert want[i].max() - want[i, tokens[i]] <= SAME * np.abs(want).max()


@pytest.mark.parametrize("name", ["sliding, full", "27b's", "window of one block"])
def test_the_steps_by_which_rows_are_observed_do_not_matter(name: str) -> None:
    b = bench(name)
    taps = features(b, 200)
    answers: list[Array] = []
    for steps in (decoding(200), decoding(0, 2), decoding(100, 3), one_by_one()):
        b.fill(taps, steps)
        answers.append(b.propose()[1])
    for other in answers[1:]:
        assert distance(other, answers[0]) <= 1e-6


@pytest.mark.parametrize("first", [1, 30, 90])
def test_rows_before_the_first_are_not_attended(first: int) -> None:
    b = bench("27b's")
    taps = features(b, 100)
    b.fill(taps, decoding(50), first)
    # Rotary positions are relative, so the plain drafter may count from `first`.
    assert distance(b.propose()[1], b.plain(taps[first:])) <= SAME
    assert distance(b.propose()[1], b.plain(taps)) >= DIFFERENT


def test_a_dropped_step_leaves_no_trace() -> None:
    b = bench("sliding, full")
    taps = features(b, 100)
    b.fill(taps, decoding(50))
    want = b.propose()[1]
    b.observe(features(b, BLOCK, 8))
    b.length -= BLOCK
    np.testing.assert_array_equal(b.propose()[1], want)


def test_forced_ids_stand_in_place_of_drafts() -> None:
    b = bench("sliding, full")
    b.fill(features(b, 20), decoding())
    free, same = b.propose()
    tokens, logits_ = b.propose(forced=(-1, 200, 0, -1, 201))
    np.testing.assert_array_equal(logits_, same)
    want = free.copy()
    want[[2, 3, 5]] = 200, 0, 201
    np.testing.assert_array_equal(tokens, want)


def _every(r: Rules, value: Any) -> tuple[Any, ...]:
    return (value,) * len(r.causal)


BROKEN: dict[str, Callable[[Rules], Rules]] = {
    "sliding layers bidirectional": lambda r: replace(r, causal=_every(r, False)),
    "full layer causal": lambda r: replace(r, causal=_every(r, True)),
    "window ignored": lambda r: replace(r, windows=_every(r, None)),
    "window one too long": lambda r: replace(r, windows=tuple(w and w + 1 for w in r.windows)),
    "window one too short": lambda r: replace(r, windows=tuple(w and w - 1 for w in r.windows)),
    "window on every layer": lambda r: replace(r, windows=_every(r, r.windows[0])),
    "other rotary base": lambda r: replace(r, theta=1e6),
    "norms of the target's kind": lambda r: replace(r, norm_offset=1.0),
    "input norm on context rows": lambda r: replace(r, context_input_norm=True),
    "other mask token": lambda r: replace(r, mask_token=r.mask_token - 1),
}


@pytest.mark.parametrize(
    ("rule", "name"), list(zip(BROKEN, itertools.cycle(["sliding, full", "27b's"]), strict=False))
)
def test_a_drafter_with_another_rule_is_far_away(name: str, rule: str) -> None:
    b = bench(name)
    taps = features(b, 60)
    b.fill(taps, decoding(30))
    assert distance(b.propose()[1], b.plain(taps, BROKEN[rule](b.rules))) >= DIFFERENT
