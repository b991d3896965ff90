"""The MTP drafter's drafts are those of an independent model, through several cycles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.checkpoints import (
    GEOMETRIES,
    DrafterGeometry,
    dequantised,
    read_safetensors,
    write_drafter,
    write_target,
)
from support.loop_models import ForcedRuns, RecordedMtp, answer, prompt
from support.reference_mtp import WRONG, MtpModel

from thor_dflash.builders.build import build
from thor_dflash.config.build import BuildConfig
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.progress import Silent
from thor_dflash.runtime.measure.score import score
from thor_dflash.runtime.session import Request, open_session

Array = NDArray[Any]

TARGET = replace(GEOMETRIES["27b"], layers=2, interval=2, mtp=True)
SAME = 2e-5
"""Largest loss of a draft against the best id, relative to the largest logit."""
DIFFERENT = 1e-2
"""Least loss of some draft by a wrong model."""


@dataclass(frozen=True, slots=True)
class Answered:
    """What was drafted, and the model that should have drafted it."""

    blocks: list[tuple[list[int], list[int], int]]
    rows: Array
    plain: MtpModel

    def loss(self, model: MtpModel, every: int = 1) -> float:
        """The largest loss of a draft against the model's best id, relative to its logits."""
        blocks = self.blocks[::every]
        return max(loss for block in blocks for loss in self._losses(model, *block))

    def _losses(
        self, model: MtpModel, tokens: list[int], chain: Sequence[int], forced: int
    ) -> list[float]:
        made = model.logits(self.rows[: len(tokens) - 1], tokens, chain)
        scores = [*zip(made, chain, strict=True)][forced:]
        return [float((x.max() - x[draft]) / np.abs(x).max()) for x, draft in scores]


@cache
def answered() -> Answered:
    """Four prefill steps, then blocks of which 1 to 4 rows are committed."""
    with TemporaryDirectory() as held:
        root, g = Path(held), TARGET
        target = write_target(root / "target", g, 3, "f32")
        raw = write_drafter(root / "raw", g, DrafterGeometry(taps=(g.layers - 1,)), 4)
        config = BuildConfig(chunk=16, capacity=256, drafts=5)
        for name, drafter in (("mtp", "mtp"), ("raw", raw)):
            build(target, drafter, root / f"{name}.package", config, Silent())
        s = open_session(root / "mtp.package", EngineConfig(threads=1), Silent())
        drafter = RecordedMtp()
        runs = ForcedRuns({4: (9, 8, 7), 9: (5,), 12: (30, 31), 17: (9, 8, 7)})
        first = Request(prompt=prompt(60, seed=1), max_tokens=24)
        tokens = [*first.prompt, *answer(s, first, drafter, (runs,))]
        twin = open_session(root / "raw.package", EngineConfig(threads=1), Silent())
        rows = score(twin, tokens, True, Silent())["taps"]
        stored = read_safetensors(target / "model.safetensors")
        weights = dequantised(target)
    wide = {n: w.astype(np.float64) for n, w in {**weights, **stored}.items()}
    plain = MtpModel(
        heads=g.heads,
        kv_heads=g.kv_heads,
        head_dim=g.head_dim,
        rotary=g.rotary,
        theta=g.rope_theta,
        eps=g.eps,
        mtp={n.removeprefix("mtp."): w for n, w in wide.items() if n.startswith("mtp.")},
        embedding=wide["model.embed_tokens.weight"],
        head=wide["lm_head.weight"],
        norm=wide["model.norm.weight"],
    )
    return Answered(drafter.blocks, rows, plain)


def test_drafts_are_those_of_the_plain_model() -> None:
    a = answered()
    lengths = np.diff([len(tokens) for tokens, _, _ in a.blocks])
    assert {1, 2, 4} <= {*lengths}, "blocks of several lengths were committed"
    assert a.loss(a.plain) <= SAME


@pytest.mark.parametrize("wrong", WRONG)
def test_a_model_with_another_rule_drafts_otherwise(wrong: str) -> None:
    a = answered()
    assert a.loss(replace(a.plain, wrong=wrong), every=4) >= DIFFERENT
