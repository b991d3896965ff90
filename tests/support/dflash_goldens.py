"""The cases of tests/goldens/dflash, for the script that makes them and for the tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support.checkpoints import GEOMETRIES, DrafterGeometry, dequantised

FOLDER = Path(__file__).parents[1] / "goldens" / "dflash"
TARGET_SEED, DRAFTER_SEED = 21, 22
SLIDING = "sliding_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A target, a drafter for it, and cycles at growing contexts."""

    target: str = "27b"
    drafter: DrafterGeometry = field(default_factory=DrafterGeometry)
    most: int = 96
    """Context rows after which a sequence begins anew."""
    count: int = 400
    """Cycles."""

    def cycles(self) -> Iterator[tuple[int, int]]:
        """Context rows and last token of each cycle. A cycle commits 1 to R rows."""
        rng = np.random.default_rng(7)
        rows, vocab = 0, GEOMETRIES[self.target].vocab
        for _ in range(self.count):
            yield rows, int(rng.integers(0, vocab))
            rows += int(rng.integers(1, self.drafter.block + 1))
            again = int(rng.integers(0, min(self.drafter.window, self.most)))
            rows = rows if rows <= self.most else again


CASES: dict[str, Case] = {
    "block8": Case(
        drafter=DrafterGeometry(
            layer_types=(SLIDING,) * 3, block=8, second=True, window=24, taps=(0, 2, 1)
        )
    ),
    "block16": Case(
        target="0.8b",
        drafter=DrafterGeometry(
            layer_types=(SLIDING,) * 2, block=16, second=True, window=40, scale=0.2, softcap=20,
            rank=24, top_k=7, conv=(2, 32), heads=8, head_dim=16,
        ),
    ),
    "within": Case(
        target="4b",
        drafter=DrafterGeometry(
            layer_types=(SLIDING,) * 2, block=8, second=True, window=2048, conv=(3, 16)
        ),
        count=250,
    ),
}  # fmt: skip
"""Windows below, at and over which the contexts grow, and one that they never reach."""


def features(case: Case) -> NDArray[np.float32]:
    """Taps [rows, taps * H] of all context rows."""
    width = len(case.drafter.taps) * GEOMETRIES[case.target].hidden
    made: NDArray[Any] = np.random.default_rng(9).standard_normal((case.most, width))
    return made.astype(np.float32)


def fingerprint(root: Path, taps: NDArray[np.float32]) -> NDArray[np.float64]:
    """What changes if checkpoints or taps are drawn otherwise."""
    weights = (*dequantised(root / "drafter").values(), *dequantised(root / "target").values())
    return np.array([np.abs(w.astype(np.float64)).sum() for w in (*weights, taps)]).sum()[None]
