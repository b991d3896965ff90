"""Taps are the outputs of the layers that the drafter's config names, and decoding uses them."""

from __future__ import annotations

from collections.abc import Callable
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
    read_config,
    write_drafter,
    write_target,
)
from support.reference_drafter import Rules, logits, rules

from thor_dflash.builders.build import build
from thor_dflash.config.build import BuildConfig
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.progress import Silent
from thor_dflash.plugins.accept import Record
from thor_dflash.runtime.decoding.block import Block, DecodeProgress, Policy
from thor_dflash.runtime.decoding.proposers import DflashDrafter
from thor_dflash.runtime.measure.score import score
from thor_dflash.runtime.session import Request, Session, open_session

Array = NDArray[Any]

TARGET = GEOMETRIES["27b"]
SAME = 2e-5
"""Largest difference of two ways to compute the same in float32, relative to the largest value."""
TOKENS = [int(t) for t in np.random.default_rng(0).integers(0, TARGET.vocab, 61)]


@dataclass(frozen=True)
class TapPair:
    """An open package, and its drafter as a plain drafter of tests/plain."""

    session: Session
    rules: Rules
    weights: dict[str, Array]
    embedding: Array
    head: Array

    def plain(self, taps: Array, last: int) -> Array:
        return logits(self.rules, self.weights, self.embedding, self.head, taps, last)

    def taps(self, tokens: list[int]) -> Array:
        return score(self.session, tokens, True, Silent())["taps"]


@cache
def pair(taps: tuple[int, ...]) -> TapPair:
    """A pair whose drafter has these taps. Pairs with equally many taps have equal weights."""
    with TemporaryDirectory() as held:
        root = Path(held)
        write_target(root / "target", TARGET, 31)
        write_drafter(root / "drafter", TARGET, DrafterGeometry(taps=taps), 32)
        config = BuildConfig(chunk=24, capacity=256)
        build(root / "target", root / "drafter", root / "package", config, Silent())
        own = dequantised(root / "target")
        return TapPair(
            open_session(root / "package", EngineConfig(threads=1), Silent()),
            rules(read_config(root / "drafter")),
            dequantised(root / "drafter"),
            own["model.embed_tokens.weight"],
            own["lm_head.weight"],
        )


def by_layer(taps: Array) -> Array:
    """Taps [T, taps * H] as [taps, T, H]."""
    return taps.reshape(len(taps), -1, TARGET.hidden).swapaxes(0, 1)


@pytest.mark.parametrize("order", [(3, 0, 1), (1, 3, 0)])
def test_taps_stand_in_the_order_of_the_config(order: tuple[int, ...]) -> None:
    sorted_ = dict(zip((0, 1, 3), by_layer(pair((0, 1, 3)).taps(TOKENS)), strict=True))
    got = by_layer(pair(order).taps(TOKENS))
    for layer, rows in zip(order, got, strict=True):
        np.testing.assert_array_equal(rows, sorted_[layer])


class Diary(Policy):
    """A policy that notes every block. It forces 0 to 9 ids in each, so that different numbers of
    rows are committed.
    """

    def __init__(self, read: Callable[[], Array]) -> None:
        self.read = read
        self.blocks: list[tuple[int, int, Array]] = []

    def shape(self, progress: DecodeProgress, block: Block) -> Block:
        count = 7 * len(self.blocks) % 10
        return replace(block, forced=tuple(TOKENS[:count]))

    def judge(self, progress: DecodeProgress, block: Block, record: Record) -> int:
        known = len(progress.prompt) + len(progress.tokens)
        self.blocks.append((known, 7 * len(self.blocks) % 10, self.read()))
        return record.count


Blocks = list[tuple[int, int, Array]]
"""Tokens known before the block, ids forced in it, and the block."""


@cache
def decoded(taps: tuple[int, ...]) -> tuple[list[int], Blocks]:
    """Prompt and answer as one list, and the blocks of the decoding."""
    session, prompt = pair(taps).session, TOKENS[:45]
    diary = Diary(lambda: session.model.read("tokens"))
    request = Request(prompt=tuple(prompt), max_tokens=120)
    answer = [t for c in session.run(request, DflashDrafter(), (diary,)) for t in c.tokens]
    assert len(answer) == 120
    assert len(diary.blocks) < 40
    return prompt + answer, diary.blocks


def regret(p: TapPair, taps: Array, tokens: list[int], blocks: Blocks) -> list[float]:
    """For each block, how far the worst draft's logit is below the largest: by the plain drafter,
    relative to its largest magnitude.
    """
    out: list[float] = []
    for known, forced, block in blocks:
        # The newest token has no taps yet: it is row 0 of the block.
        assert block[0] == tokens[known - 1]
        written = p.plain(taps[: known - 1], tokens[known - 1])[forced + 1 :]
        chosen = np.take_along_axis(written, block[forced + 1 :, None].astype(np.int64), axis=1)
        out.append(float((written.max(axis=1) - chosen[:, 0]).max() / np.abs(written).max()))
    return out


def test_decoding_proposes_what_the_plain_drafter_would() -> None:
    p = pair((0, 1, 2))
    tokens, blocks = decoded((0, 1, 2))
    assert max(regret(p, p.taps(tokens), tokens, blocks)) <= SAME
