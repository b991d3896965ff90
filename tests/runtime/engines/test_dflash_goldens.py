"""Drafts equal those of the authors' own package, cycle by cycle: see tests/goldens/dflash."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import GEOMETRIES, write_drafter, write_target
from support.dflash_goldens import (
    CASES,
    DRAFTER_SEED,
    FOLDER,
    TARGET_SEED,
    Case,
    features,
    fingerprint,
)
from support.drafter_bench import CHUNK, DrafterKind, make_bench

QUICK = 40
"""Cycles of one case that are run always, across its window."""


def different(name: str, case: Case) -> list[int]:
    """Numbers of the cycles whose drafts are not the authors'."""
    bench = make_bench(
        DrafterKind(geometry=case.drafter, target=case.target), seeds=(TARGET_SEED, DRAFTER_SEED)
    )
    want, taps = np.load(FOLDER / f"{name}.npz")["drafts"], features(case)
    wrong: list[int] = []
    for i, (rows, last) in enumerate(case.cycles()):
        if rows < bench.length:
            bench.clear()
        while (left := rows - bench.length) > 0:
            graph, most = (
                ("observe", bench.block) if left <= bench.block else ("observe_chunk", CHUNK)
            )
            bench.observe(taps[bench.length : bench.length + min(left, most)], graph)
        wrong += [i] * (bench.propose(last)[0][1:].tolist() != want[i].tolist())
    return wrong


def test_drafts_are_the_authors() -> None:
    assert not different("block16", replace(CASES["block16"], count=QUICK))


@pytest.mark.slow
def test_a_thousand_cycles_and_none_differs() -> None:
    assert sum(case.count for case in CASES.values()) > 1000
    for name, case in CASES.items():
        assert not different(name, case), name


@pytest.mark.parametrize("name", CASES)
def test_the_goldens_are_of_these_checkpoints(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    write_target(tmp_path / "target", GEOMETRIES[case.target], TARGET_SEED)
    write_drafter(tmp_path / "drafter", GEOMETRIES[case.target], case.drafter, DRAFTER_SEED)
    found = np.load(FOLDER / f"{name}.npz")["fingerprint"]
    np.testing.assert_allclose(fingerprint(tmp_path, features(case)), found, rtol=1e-12)
