"""The graphs of DFlash2 drafters equal the plain drafter, and differ from those with one of the
errors seen in other implementations.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.checkpoints import DrafterGeometry
from support.drafter_bench import (
    ANCHOR,
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

SAME, DIFFERENT = 1e-5, 1e-2
"""As in test_drafter."""
NEAR = 1e-4
"""Drafts must be equal where every choice leads by more."""
EIGHT = DrafterGeometry(layer_types=(SLIDING,) * 3, block=8, second=True, window=24, taps=(0, 1, 3))
IDS = tuple(range(1, 250, 2))
KINDS: dict[str, tuple[DrafterKind, tuple[int, ...]]] = {
    "block 8": (DrafterKind(geometry=EIGHT), ()),
    "block 16": (
        DrafterKind(
            geometry=replace(EIGHT, block=16, scale=0.05, softcap=20.0, top_k=16, rank=24),
            target="0.8b",
        ),
        (),
    ),
    "nvfp4": (DrafterKind(geometry=EIGHT, dialect="modelopt", target_dialect="modelopt"), ()),
    "reduced": (DrafterKind(geometry=EIGHT, target="0.8b", dialect="fp8"), IDS),
}
CONTEXTS = (0, 1, 17, 24, 25, 40, 65, 145)
"""With a window of 24 and 8 rows, row 7 first loses context row 0 at a context of 17, row 0 at 24;
a ring has 24 + CHUNK slots.
"""


@cache
def bench(name: str) -> DrafterBench:
    kind, ids = KINDS[name]
    return make_bench(kind, ids)


def filled(name: str, count: int, seed: int = 0) -> tuple[DrafterBench, Array]:
    """A bench that has observed `count` rows, and their taps."""
    b = bench(name)
    taps = features(b, max(CONTEXTS), seed)[:count]
    b.fill(taps, decoding(count // 2, count, b.block))
    return b, taps


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ("block 16", "nvfp4") else ())
        for name in KINDS
    ],
)
def test_drafts_are_the_plain_drafters(name: str) -> None:
    ids = np.array(KINDS[name][1]) if KINDS[name][1] else None
    clear = 0
    for count in CONTEXTS:
        b, taps = filled(name, count)
        tokens, got = b.propose()
        want = b.plain(taps)
        assert distance(got, want if ids is None else want[:, ids]) <= SAME, count
        drafts, lead = b.drafts(taps, ids=ids)
        if lead > NEAR:
            assert tokens.tolist() == [ANCHOR, *drafts], count
        clear += lead > NEAR
    assert clear > len(CONTEXTS) / 2


def test_forced_ids_are_the_predecessors_of_the_next_slots() -> None:
    b, taps = filled("block 8", 40)
    forced = (-1, 200, -1, 60, 61)
    after = {i + 1: token for i, token in enumerate(forced) if token >= 0}
    tokens, _ = b.propose(forced=forced)
    assert tokens.tolist() == [ANCHOR, *b.drafts(taps, forced=after)[0]]
    late = b.propose()[0]
    assert tokens[3] != late[3], "the forced id before slot 3 changes nothing"


def _rules(**changes: Any) -> Callable[[Rules], Rules]:
    return lambda r: replace(r, **changes)


ROWS: dict[str, Callable[[Rules], Rules]] = {
    **{
        wrong: _rules(wrong=wrong)
        for wrong in (
            "taps exchanged",
            "sides exchanged",
            "kernel of the row before",
            "groups and taps exchanged",
            "row 0 sees the last row",
        )
    },
    "no convolution": _rules(conv=None),
    "causal": lambda r: replace(r, causal=(True,) * len(r.causal)),
    "window one too long": lambda r: replace(r, windows=tuple(w and w + 1 for w in r.windows)),
    "window one too short": lambda r: replace(r, windows=tuple(w and w - 1 for w in r.windows)),
}


@pytest.mark.parametrize(
    ("rule", "name"), list(zip(ROWS, itertools.cycle(["block 8", "block 16"]), strict=False))
)
def test_other_rows_are_far_away(rule: str, name: str) -> None:
    b, taps = filled(name, 64)
    assert distance(b.propose()[1], b.plain(taps, ROWS[rule](b.rules))) >= DIFFERENT


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        *((wrong, "block 8") for wrong in (
            "codebooks exchanged", "hidden of the row before", "always after the last",
            "edges ignored",
        )),
        ("multiplier ignored", "block 16"),
    ],
)  # fmt: skip
def test_another_walk_drafts_other_tokens(wrong: str, name: str) -> None:
    changed = 0
    for count in CONTEXTS:
        b, taps = filled(name, count)
        drafts, _ = b.drafts(taps, replace(b.rules, wrong=wrong))
        changed += b.propose()[0].tolist() != [ANCHOR, *drafts]
    assert changed >= 3


def test_the_context_is_not_convolved() -> None:
    """Rings hold what a DFlash drafter of the same weights would hold: `observe` has no kernels."""
    b = bench("block 8")
    for graph in ("observe", "observe_chunk"):
        names = {i.name for i in b.graphs[graph].get_inputs()}
        assert not any("conv" in name for name in names)
    a, taps = filled("block 8", 40)
    rings = {name: ring.copy() for name, ring in a.rings.items()}
    a.propose(forced=(3, 4))
    assert all((rings[name] == ring).all() for name, ring in a.rings.items())
    assert len(taps) == a.length
