"""The search decides by times alone; here a random generator is the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from thor_dflash.runtime.measure.launch_search import Sample, Times, search


def device(times: Sequence[Times], noise: float, seed: int, drift: float = 0.0) -> Sample:
    """A device that takes `times`, with relative normal noise and a clock that gets slower."""
    rng, runs = np.random.default_rng(seed), iter(range(10**6))

    def sample(i: int) -> Times:
        slower = 1 + drift * next(runs)
        return tuple(t * slower * (1 + noise * float(rng.standard_normal())) for t in times[i])

    return sample


@pytest.mark.parametrize("drift", [0.0, 0.002])
def test_a_slow_rule_is_replaced_by_the_fastest(drift: float) -> None:
    times = [(100.0,), (99.0,), (90.0,), (130.0,)]
    found = [search(4, device(times, 0.003, seed, drift)).chosen for seed in range(50)]
    assert found.count(2) == 50


def test_a_gain_within_the_noise_takes_more_rounds() -> None:
    times = [(100.0,), (98.5,)]
    found = [search(2, device(times, 0.01, seed)).chosen for seed in range(50)]
    assert found.count(1) > 30


def test_noise_alone_seldom_replaces_a_rule() -> None:
    flips = sum(search(5, device([(100.0,)] * 5, 0.01, seed)).chosen > 0 for seed in range(300))
    assert flips <= 9, "3 % of 300"


def test_a_gain_that_is_no_gain_is_refused() -> None:
    assert search(2, device([(100.0,), (99.95,)], 0.0, 0)).chosen == 0


def test_what_is_slower_in_one_context_is_not_chosen() -> None:
    times = [(50.0, 200.0), (51.0, 150.0), (49.9, 180.0)]
    assert search(2, device(times, 0.001, 3)).chosen == 0
    assert search(3, device([times[0], times[2], times[2]], 0.001, 3)).chosen > 0


def test_a_launch_that_is_hopeless_is_measured_twice_only() -> None:
    calls: list[int] = []
    inner = device([(100.0,), (150.0,)], 0.001, 1)

    def sample(i: int) -> Times:
        calls.append(i)
        return inner(i)

    found = search(2, sample)
    assert calls.count(1) == 2
    assert found.medians[1][0] == pytest.approx(150.0, rel=0.01)
