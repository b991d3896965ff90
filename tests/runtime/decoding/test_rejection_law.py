"""End to end: the tokens at each position of drawn answers have one law, plain and by rejection."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from support.loop_models import answer
from support.planner_nano import package, request

from thor_dflash.config.decode import SamplingConfig
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.progress import Silent
from thor_dflash.core.tensors import Array
from thor_dflash.runtime.decoding.proposers import DflashDrafter, NoDrafter
from thor_dflash.runtime.session import Session, open_session

SEEDS, POSITIONS, RELABELLED = 256, 32, 499
HOT = SamplingConfig(temperature=1.5, top_k=50, acceptance="rejection")
"""So hot that answers differ from their first tokens on, and most blocks have a rejected draft."""


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    out = package(tmp_path_factory.mktemp("law") / "nano", drafter="drafter2")
    with closing(open_session(out, EngineConfig(threads=1), Silent())) as opened:
        yield opened


def apart(a: Array, b: Array) -> float:
    """Chi-square distance of two sets of sequences, by the tokens at each position."""
    total = 0.0
    for at in range(POSITIONS):
        x, y = (np.bincount(rows[:, at], minlength=2048).astype(float) for rows in (a, b))
        total += ((x - y)[x + y > 0] ** 2 / (x + y)[x + y > 0]).sum()
    return total


def alike(a: Array, b: Array) -> bool:
    """Whether they are less apart than nearly all splits of all sequences in two. Tokens of one
    sequence depend on each other, so that sequences are exchanged whole.
    """
    rng, every, own = np.random.default_rng(1), np.concatenate([a, b]), apart(a, b)
    further = 0
    for _ in range(RELABELLED):
        order = rng.permutation(len(every))
        further += apart(every[order[: len(a)]], every[order[len(a) :]]) >= own
    return further >= RELABELLED // 100


@pytest.mark.slow
def test_every_position_has_the_plain_law(session: Session) -> None:
    """Seeds of one half are not those of the other, as a position's noise is in common else."""
    asked = replace(request(session, 0, POSITIONS), stop=frozenset())
    session.prefixes.put("task", asked.prompt[:-1])
    answers: dict[str, list[list[int]]] = {"plain": [], "rejection": []}
    for seed in range(SEEDS):
        drawn = replace(asked, sampling=replace(HOT, seed=seed))
        answers["rejection"].append(answer(session, drawn, DflashDrafter()))
        drawn = replace(asked, sampling=replace(HOT, seed=SEEDS + seed))
        answers["plain"].append(answer(session, drawn, NoDrafter()))
    plain, rejection = (np.array([row[:POSITIONS] for row in rows]) for rows in answers.values())
    assert alike(plain, rejection)
    # A tenth of the tokens made the best of their position must be noticed.
    shifted = rejection.copy()
    for at in range(POSITIONS):
        common = np.bincount(rejection[:, at]).argmax()
        shifted[np.random.default_rng(at).random(SEEDS) < 0.1, at] = common
    assert not alike(plain, shifted)
