"""The law of the draws: exactly the processed distribution, and coupled drafts agree as often as
they should. Every test is shown to notice a mistake.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from support.chi_square import likely
from support.op_cases import sample_case

from thor_dflash.core.tensors import Array
from thor_dflash.plugins import SAMPLE
from thor_dflash.plugins.numpy_noise import noise
from thor_dflash.plugins.sample.reference import processed

DRAWS = 40_000
WIDTH = 14
CELLS = {
    "whole": (1.0, 0, 1.0, 0.0),
    "cold": (0.6, 0, 1.0, 0.0),
    "hot": (3.0, 0, 1.0, 0.0),
    "top_k": (1.0, 4, 1.0, 0.0),
    "top_p": (1.0, 0, 0.7, 0.0),
    "min_p": (1.5, 0, 1.0, 0.1),
    "all": (0.8, 9, 0.95, 0.02),
}
"""temperature, top_k, top_p, min_p."""


def logits() -> Array:
    """Ids of every probability down to 1e-5, in no order."""
    return (np.random.default_rng(5).permutation(WIDTH) * -0.9).astype(np.float32)


def expected(x: Array, temperature: float, top_k: int, top_p: float, min_p: float) -> Array:
    """The processed distribution in float64, written as transformers' warpers are."""
    z = x.astype(np.float64) / temperature
    if top_k:
        z[z < np.sort(z)[-top_k]] = -np.inf
    if top_p < 1:
        order = np.argsort(z)
        p = np.exp(z[order] - z.max())
        z[order[np.cumsum(p / p.sum()) <= 1 - top_p]] = -np.inf
    p = np.exp(z - z.max())
    p[p < min_p] = 0
    return np.asarray(p / p.sum())


def draws(x: Array, cell: tuple[float, int, float, float], seed: int, count: int = DRAWS) -> Array:
    """So many ids, each for a position of its own."""
    temperature, top_k, top_p, min_p = cell
    case = sample_case(
        "",
        x[None],
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_log_p=math.log(min_p) if min_p else -math.inf,
    )
    ids, z = processed(case.inputs, SAMPLE.complete({}), 0)
    score = z + noise(seed, np.arange(count)[:, None], ids)
    return np.asarray(ids[score.argmax(axis=1)])


@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_draws_have_the_processed_law(cell: tuple[float, int, float, float]) -> None:
    x = logits()
    assert likely(draws(x, cell, 3), expected(x, *cell))


def test_a_tenth_of_the_mass_elsewhere_is_noticed() -> None:
    x, cell = logits(), CELLS["whole"]
    p = expected(x, *cell)
    best, second = np.argsort(-p)[:2]
    moved = p.copy()
    moved[best] -= 0.1
    moved[second] += 0.1
    assert not any(likely(draws(x, cell, seed, 2000), moved) for seed in range(10))
    assert all(likely(draws(x, cell, seed, 2000), p) for seed in range(10))


@pytest.mark.parametrize(("name", "other"), [("top_k", "whole"), ("whole", "cold"), ("all", "hot")])
def test_the_law_of_another_request_is_noticed(name: str, other: str) -> None:
    x = logits()
    assert not likely(draws(x, CELLS[name], 3), expected(x, *CELLS[other]))


def test_the_operator_draws_so() -> None:
    x, (temperature, top_k, top_p, _) = logits(), CELLS["all"]
    how = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    case = sample_case("", np.tile(x, (200, 1)), length=0, seed=np.array([3, 0]), **how)
    found = SAMPLE.reference(case.inputs, SAMPLE.complete({}))["choice"]
    assert np.array_equal(found, draws(x, (temperature, top_k, top_p, 0.0), 3, 200))
    moved = sample_case("", np.tile(x, (200, 1)), length=1, seed=np.array([3, 0]), **how)
    later = SAMPLE.reference(moved.inputs, SAMPLE.complete({}))["choice"]
    assert np.array_equal(later[:-1], found[1:])
    assert not np.array_equal(later, found)


def test_coupled_draws_agree_as_often_as_they_should() -> None:
    """Source: Daliri, Musco and Suresh 2024, theorem 3."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal(WIDTH).astype(np.float32) * 2
    y = x + rng.standard_normal(WIDTH).astype(np.float32)
    p, q = (expected(v, 1.0, 0, 1.0, 0.0) for v in (x, y))
    ours, theirs = (draws(v, CELLS["whole"], 9) for v in (x, y))
    want = sum(1 / np.maximum(p / p[i], q / q[i]).sum() for i in range(WIDTH))
    sigma = math.sqrt(want * (1 - want) / DRAWS)
    assert abs((ours == theirs).mean() - want) < 4 * sigma
    assert want > (1 - np.abs(p - q).sum() / 2) / (1 + np.abs(p - q).sum() / 2)
    apart = draws(y, CELLS["whole"], 10)  # other noise: as if draft and target were independent
    assert abs((ours == apart).mean() - (p * q).sum()) < 4 * sigma < want - (p * q).sum()
