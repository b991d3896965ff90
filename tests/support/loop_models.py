"""For tests of the decoding loop: small packages with random weights, and drafters that are always,
sometimes or never right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
from support.checkpoints import (
    GEOMETRIES,
    Dialect,
    DrafterGeometry,
    TargetGeometry,
    write_drafter,
    write_target,
)

from thor_dflash.builders.build import build
from thor_dflash.config.build import BuildConfig
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.progress import Silent
from thor_dflash.runtime.decoding.block import Block, DecodeProgress, Policy
from thor_dflash.runtime.decoding.model_runner import ModelRunner
from thor_dflash.runtime.decoding.mtp import MtpDrafter
from thor_dflash.runtime.decoding.proposers import CallableDrafter, Proposal, Proposer
from thor_dflash.runtime.session import Request, Session, open_session

NARROW = TargetGeometry(
    hidden=60, heads=4, kv_heads=2, head_dim=18, key_heads=4, value_heads=4, key_dim=17, value_dim=5
)
"""Its heads begin at any element of 4, but its rows all begin alike (builders/engine_limits.py)."""

SHORT = replace(GEOMETRIES["27b"], layers=2, interval=2)
"""A layer of each kind: for laws that do not depend on the depth, in half of the time."""

_HELD: list[TemporaryDirectory[str]] = []
"""Directories of the cached sessions, removed when the process ends."""


@cache
def session(
    geometry: str = "short",
    dialect: Dialect = "bf16",
    saves: str = "records",
    chunk: int = 32,
    capacity: int = 512,
    drafter: bool = True,
    block: int = 0,
    kv: Literal["f32", "bf16", "fp8"] = "f32",
    draft_layers: tuple[str, ...] = DrafterGeometry().layer_types,
    reuse: int = 0,
    second: bool = False,
    mtp: bool = False,
    drafts: int = 3,
) -> Session:
    """Returns a session over a model of random weights, the same one for the same arguments. Its
    geometry is SHORT, NARROW or one of GEOMETRIES. With `second` the drafter is a DFlash2 drafter
    of 8 rows; with `mtp` it is the target's MTP layer.
    """
    held = TemporaryDirectory()
    _HELD.append(held)
    root = Path(held.name)
    g = {**GEOMETRIES, "narrow": NARROW, "short": SHORT}[geometry]
    g = replace(g, mtp=mtp)
    taps = tuple(layer for layer in DrafterGeometry().taps if layer < g.layers)
    write_target(root / "target", g, 3, dialect)
    own = DrafterGeometry(
        taps=taps, layer_types=draft_layers, second=second, block=8 if second else 16
    )
    write_drafter(root / "drafter", g, own, 4)
    config = BuildConfig(
        saves="states" if saves == "states" else "records",
        chunk=chunk,
        capacity=capacity,
        block=block,
        kv=kv,
        drafts=drafts,
    )
    drafter_of = "mtp" if mtp else root / "drafter" if drafter else None
    build(root / "target", drafter_of, root / "package", config, Silent())
    return open_session(root / "package", EngineConfig(threads=1), Silent(), reuse=reuse)


def prompt(length: int, seed: int = 0, vocab: int = 240) -> tuple[int, ...]:
    """Returns a prompt of random token ids."""
    return tuple(int(t) for t in np.random.default_rng(seed).integers(0, vocab, length))


def answer(
    s: Session, request: Request, proposer: Proposer, policies: tuple[Policy, ...] = ()
) -> list[int]:
    """Answer a request and return all tokens."""
    return [t for c in s.run(request, proposer, policies) for t in c.tokens]


def drafts(guess: Callable[[int], Sequence[int]]) -> CallableDrafter:
    """Returns a drafter whose drafts depend only on the number of tokens answered so far."""
    return CallableDrafter(lambda progress: guess(len(progress.tokens)))


def oracle(truth: Sequence[int], rows: int = 16) -> CallableDrafter:
    """Returns a drafter that always drafts the true continuation."""
    return drafts(lambda n: _padded(truth[n : n + rows - 1], rows))


def erring(truth: Sequence[int], rate: float, seed: int, rows: int = 16) -> CallableDrafter:
    """Returns a drafter of the true continuation in which each token is wrong with probability
    `rate`.
    """
    rng = np.random.default_rng(seed)

    def guess(progress: DecodeProgress) -> Sequence[int]:
        n = len(progress.tokens)
        right = _padded(truth[n : n + rows - 1], rows)
        return [(t + 1) % 240 if rng.random() < rate else t for t in right]

    return CallableDrafter(guess)


def hostile(truth: Sequence[int], rows: int = 16) -> CallableDrafter:
    """Returns a drafter whose first token is always wrong, so that none of a block is accepted; the
    other tokens are the true ones, as far as their ids are below 240.
    """
    return drafts(
        lambda n: [
            (t + (i == 0)) % 240 for i, t in enumerate(_padded(truth[n : n + rows - 1], rows))
        ]
    )


class ForcedRuns(Policy):
    """Forces ids at some places of the answer."""

    def __init__(self, runs: dict[int, tuple[int, ...]]) -> None:
        self._ids = {at + i: ids[i] for at, ids in runs.items() for i in range(len(ids))}

    def shape(self, progress: DecodeProgress, block: Block) -> Block:
        at, ids = len(progress.tokens), self._ids
        run = tuple(ids.get(at + i, -1) for i in range(block.cap))
        end = run.index(-1) if -1 in run else len(run)
        ahead = next((i for i, token in enumerate(run) if i >= end and token >= 0), block.cap)
        block = block.forcing(run[:end], "test") if end else block
        return block.capped(max(1, ahead), "test")


@dataclass(slots=True)
class RecordedMtp(MtpDrafter):
    """Keeps every block of its own: the tokens before it, its drafts, and how many were forced."""

    blocks: list[tuple[list[int], list[int], int]] = field(
        default_factory=list[tuple[list[int], list[int], int]]
    )
    before: list[int] = field(default_factory=list[int])

    def propose(self, model: ModelRunner, progress: DecodeProgress, block: Block) -> Proposal:
        self.before = [*progress.prompt, *progress.tokens]
        return MtpDrafter.propose(self, model, progress, block)

    def committed(self, model: ModelRunner, block: Block, count: int) -> None:
        if self._drafted:
            drafts = [int(t) for t in model.read("tokens")[1:]]
            self.blocks.append((self.before, drafts, len(block.forced)))
        MtpDrafter.committed(self, model, block, count)


DEAD = drafts(lambda n: [0] * 15)
"""A drafter that always drafts token 0, fifteen times."""


def _padded(tokens: Sequence[int], rows: int) -> list[int]:
    return [*tokens, *[0] * (rows - 1 - len(tokens))]
