"""Rejection sampling: tokens have the target's law, whatever drafts they are drawn beside. Every
test is shown to notice a mistake.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from itertools import product

import numpy as np
import pytest
from support.chi_square import likely
from support.op_cases import sample_case
from support.op_models import model, run

from thor_dflash.core.tensors import Array
from thor_dflash.plugins import SAMPLE
from thor_dflash.plugins.numpy_noise import DRAFT, RESIDUAL, noise

reference = import_module("thor_dflash.plugins.sample.reference")  # its package exports a function
DRAWS = 20_000
WORDS = 2**32
IDS = 4
Tokens = tuple[int, ...]


# ---- the exact law -------------------------------------------------------------------------------
def softmax(x: Array) -> Array:
    e = np.exp(x.astype(np.float64) - x.max())
    return np.asarray(e / e.sum())


class Row:
    """One row's target and draft distribution over IDS ids, with zeros in both."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.z = np.sort(rng.standard_normal(IDS) * 2).astype(np.float32)[::-1]
        self.z = (self.z - self.z[0])[: int(rng.integers(2, IDS + 1))]
        self.ids = rng.permutation(IDS)[: len(self.z)]
        self.candidates = rng.permutation(IDS)[: int(rng.integers(2, IDS + 1))]
        self.scores = (rng.standard_normal(len(self.candidates)) * 2).astype(np.float32)
        self.p, self.q = np.zeros(IDS), np.zeros(IDS)
        self.p[self.ids], self.q[self.candidates] = softmax(self.z), softmax(self.scores)

    def chosen(self, draft: int, monkeypatch: pytest.MonkeyPatch) -> Array:
        """The law of the row's choice given its draft: the share of the 2^32 words of u that
        accept it, found by bisection, and the softmax of what is drawn from else.
        """
        found: dict[str, tuple[Array, Array]] = {}

        def largest(ids: Array, score: Array) -> int:
            found["rest"] = ids, score
            return -1

        monkeypatch.setattr(reference, "largest", largest)
        monkeypatch.setattr(reference, "noise", lambda *_: np.float32(0))
        low, high = -1, WORDS  # accepted up to low, not from high on
        while high - low > 1:
            middle = (low + high) // 2
            word = np.array(middle, np.uint32)
            monkeypatch.setattr(reference, "words", lambda *_, word=word: word)
            law = reference.draft_law(self.scores)
            got = reference.reject(self.ids, self.z, self.candidates, law, draft, 0, np.array(0))
            low, high = (middle, high) if got == draft else (low, middle)
        out = np.zeros(IDS)
        out[draft] = high / WORDS
        if high < WORDS:
            ids, score = found["rest"]
            out[ids] += (1 - out[draft]) * softmax(score)
        return out


class Cycle:
    """The law of the first three tokens: one cycle with two drafts, the second drawn after the
    first, and what follows it decoded plainly.
    """

    def __init__(self, rows: Callable[[Tokens], Row], laws: Callable[[Tokens, int], Array]) -> None:
        self.rows, self.laws = rows, laws
        self.found = dict.fromkeys(product(range(IDS), repeat=3), 0.0)
        self.drafted((), 1.0)

    def plainly(self, tokens: Tokens, chance: float) -> None:
        if len(tokens) == 3:
            self.found[tokens] += chance
            return
        for token, p in enumerate(self.rows(tokens).p):
            self.plainly((*tokens, token), chance * p)

    def drafted(self, tokens: Tokens, chance: float) -> None:
        if len(tokens) == 2:
            self.plainly(tokens, chance)
            return
        q = self.rows(tokens).q
        for draft in range(IDS):
            for token, p in enumerate(self.laws(tokens, draft)) if q[draft] else ():
                go_on = self.drafted if token == draft else self.plainly
                go_on((*tokens, token), chance * q[draft] * p)


@pytest.mark.parametrize("seed", range(3))
def test_a_cycle_and_what_follows_have_the_targets_law(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[Tokens, Row] = {}

    def rows(tokens: Tokens) -> Row:
        number = 100 * seed + sum((t + 1) * 5**i for i, t in enumerate(tokens))
        return made.setdefault(tokens, Row(number))

    @cache
    def laws(tokens: Tokens, draft: int) -> Array:
        return rows(tokens).chosen(draft, monkeypatch)

    for tokens, chance in Cycle(rows, laws).found.items():
        want = np.prod([rows(tokens[:i]).p[t] for i, t in enumerate(tokens)])
        assert abs(chance - want) < 1e-6, tokens


# ---- draws ---------------------------------------------------------------------------------------
P = np.log([0.1, 0.6, 0.3, 1e-9, 1e-9]).astype(np.float32)
CANDIDATES = np.array([1, 0, 4], np.int32)
SCORES = np.log([0.3, 0.65, 0.05]).astype(np.float32)
"""Most drafts are of id 0, which the target has little of. Half of what remains is of id 2, which
no draft is, so that noise of a draft would favour it.
"""


def drafts(purpose: int) -> Array:
    """A draft for each of DRAWS positions, by noise of this purpose."""
    score = SCORES + noise(5, 10 + np.arange(DRAWS)[:, None], CANDIDATES, purpose)
    return np.asarray(CANDIDATES[score.argmax(axis=1)])


def choices(found: Array) -> Array:
    """The choices beside these drafts, by the operator's ONNX function."""
    case = sample_case(
        "draws", np.tile(P, (DRAWS + 1, 1)), length=10, seed=np.array([5, 0]),
        tokens=np.append(0, found), drawn=DRAWS, candidates=np.tile(CANDIDATES, (DRAWS + 1, 1)),
        scores=np.tile(SCORES, (DRAWS + 1, 1)),
    )  # fmt: skip
    out = {name: np.zeros(DRAWS + 1, np.int32) for name in ("choice", "last")}
    return run(model(SAMPLE, case, out), case.inputs, out)["choice"][:DRAWS]


def test_draws_have_the_targets_law_and_agree_with_drafts_as_often_as_can_be() -> None:
    found = drafts(DRAFT)
    got, p = choices(found), softmax(P)
    q = np.zeros(len(P))
    q[CANDIDATES] = softmax(SCORES)
    assert likely(found, q)
    assert likely(got, p)
    want = np.minimum(p, q).sum()
    assert abs((got == found).mean() - want) < 4 * np.sqrt(want * (1 - want) / DRAWS)


def test_drafts_that_share_the_residual_draws_noise_are_noticed() -> None:
    """Source: vLLM #54282."""
    assert not likely(choices(drafts(RESIDUAL)), softmax(P))
