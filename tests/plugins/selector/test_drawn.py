"""Drawn drafts use the target's own noise: of equal logits, selector and sample draw equal ids."""

from __future__ import annotations

import numpy as np
import pytest
from support.dflash2_cases import selector_case

from thor_dflash.plugins import SAMPLE, SELECTOR


@pytest.mark.parametrize(("seed", "temperature"), [(1, 1.0), (2, 0.6), (3, 2.5)])
def test_selector_and_sample_draw_the_same(seed: int, temperature: float) -> None:
    rng = np.random.default_rng(seed)
    _, x, a = selector_case(rng, "", 16, 300, reduced=90)
    x["predecessors"][:] = 0
    how = {
        "length": np.array([1000 * seed], np.int32),
        "seed": rng.integers(-(2**31), 2**31, 2).astype(np.int32),
        "temperature": np.array([temperature], np.float32),
    }
    tokens = SELECTOR.reference(x | how, SELECTOR.complete(a))["tokens"]
    cuts = {"top_k": np.array([16], np.int32), "top_p": np.ones(1, np.float32)}
    cuts["min_log_p"] = np.array([-np.inf], np.float32)
    same = {name: x[name] for name in ("logits", "id_map")}
    choice = SAMPLE.reference(same | how | cuts, SAMPLE.complete({"first": 0}))["choice"]
    assert tokens[1:].tolist() == choice[1:].tolist()
    greedy = SELECTOR.reference(x, SELECTOR.complete(a))["tokens"]
    assert (tokens != greedy).any()
