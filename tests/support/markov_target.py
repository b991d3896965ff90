"""A target and a drafter that are tables, in a session with the real loop, draws and acceptance.

A row of the target depends on its token alone: an answer is a Markov chain, whose law is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from thor_dflash.config.decode import SamplingConfig
from thor_dflash.core.tensors import Array
from thor_dflash.runtime.decoding.proposers import DflashDrafter, Proposer
from thor_dflash.runtime.engines.ort import OrtEngine
from thor_dflash.runtime.engines.protocol import Call
from thor_dflash.runtime.session import Request, Session

IDS, TEMPERATURE = 6, 0.6
SHARES = (0.04, 0.6, 0.3, 0.03, 0.02, 0.01)
"""The target's law of the steps from one id to the next, in a circle."""
DRAFTED = (0.55, 0.41, 0.01, 0.01, 0.01, 0.01)
"""The drafter's. Most drafts are rejected, and what p has more than q is shared by an id that is
often drafted and one that is not, so that noise of the draft in the draw of the rest would show.
"""


def _circle(shares: Sequence[float]) -> Array:
    """[IDS, IDS] the law of the id after each."""
    return np.array([np.roll(shares, step) for step in range(IDS)])


CHAIN = _circle(SHARES)
LENGTH = 32
"""Tokens of an answer. It begins after id 0."""

Spoil = Callable[[Call], None]
"""May change what a call has left, as a mistake in its graph would."""


def softmax(x: Array) -> Array:
    """Of the last axis, in float64."""
    e = np.exp(x.astype(np.float64) - x.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True))


def marginals() -> Array:
    """[LENGTH, IDS] the law of the token at each position."""
    found = np.eye(IDS)[0]
    return np.array([found := found @ CHAIN for _ in range(LENGTH)])


def _logits(law: Array) -> Array:
    return np.asarray(TEMPERATURE * np.log(law), np.float32)


@dataclass
class Tables:
    """The logits of a target and of a drafter, whose rows know the last token alone."""

    rows: int
    edges: bool = False
    """Whether a draft depends on the one before it, by a selector's codebooks of random numbers."""
    spoil: Spoil = lambda call: None
    drafts: Array = field(init=False)
    """[rows, IDS, IDS] by row and last token; row 0 drafts nothing."""

    def __post_init__(self) -> None:
        ways = [np.linalg.matrix_power(CHAIN, max(row - 1, 0)) for row in range(self.rows)]
        self.drafts = _logits(np.array(ways) @ _circle(DRAFTED))
        self._target = _logits(CHAIN)

    def run(self, call: Call) -> bool:
        """Compute a call of the neural network; False for any other."""
        out: dict[str, Any] = {name: array(tensor) for name, tensor in call.outputs.items()}
        match call.graph.name.partition(".")[0]:
            case "verify":
                _fill(out["logits"], self._target[array(call.inputs["tokens"]) % IDS])
            case "propose":
                _fill(out["draft_logits"], self.drafts[:, int(array(call.inputs["last"])[0])])
                if "draft_hidden" in out:
                    hidden = np.random.default_rng(5).standard_normal(out["draft_hidden"].shape)
                    out["draft_hidden"][:] = hidden * self.edges
            case "observe":
                pass
            case _:
                return False
        return True


@dataclass(kw_only=True)
class TableEngine(OrtEngine):
    """An engine whose neural network is tables."""

    tables: Tables

    def run(self, calls: Sequence[Call]) -> None:
        for call in calls:
            if not self.tables.run(call):
                super().run([call])
            self.tables.spoil(call)


def array(tensor: Any) -> Array:
    """The memory of a tensor of ONNX Runtime's engine."""
    array: Array = tensor.now.array
    return array


def _fill(logits: Array, known: Array) -> None:
    logits[:] = -np.inf
    logits[:, :IDS] = known


def _draft_laws(s: Session, how: SamplingConfig) -> Array:
    """[rows, IDS] what each draft was drawn from."""
    if how.acceptance == "coupled":
        return softmax(s.model.read("draft_logits")[1:, :IDS] / how.temperature)
    ids, scores = (s.model.read(f"draft.{name}")[:-1, :IDS] for name in ("candidates", "scores"))
    q = np.zeros(ids.shape)
    np.put_along_axis(q, ids, softmax(scores), axis=1)
    return q


@contextmanager
def tabled(s: Session, tables: Tables) -> Iterator[Session]:
    """The session while its neural network is these tables."""
    own = s.model.engine
    assert isinstance(own, OrtEngine)
    s.model.engine = TableEngine(own.package, own.threads, tables=tables)
    try:
        yield s
    finally:
        s.model.engine = own


@dataclass
class DraftCount:
    """How often drafts were accepted, and how often they should have been."""

    accepted: int = 0
    chances: list[float] = field(default_factory=list[float])

    def decided(self, s: Session, how: SamplingConfig, tokens: Sequence[int]) -> None:
        """Take in the block just run, of which these tokens were committed."""
        drafts = s.model.read("tokens")[1:][: len(tokens)]
        p = softmax(s.model.read("logits")[: len(drafts), :IDS] / how.temperature)
        q = _draft_laws(s, how)[: len(drafts)]
        if how.acceptance == "rejection":
            self.chances += np.minimum(p, q).sum(axis=1).tolist()
        else:
            ratios = np.maximum(*(law[:, None, :] / law[:, :, None] for law in (p, q)))
            self.chances += (1 / ratios.sum(axis=2)).sum(axis=1).tolist()
        self.accepted += int((drafts == tokens[: len(drafts)]).sum())

    @property
    def sigmas(self) -> float:
        """Distance of both, in standard deviations."""
        p = np.array(self.chances)
        return float((self.accepted - p.sum()) / np.sqrt((p * (1 - p)).sum()))


def answers(
    s: Session, how: SamplingConfig, proposer: Proposer, seeds: Sequence[int]
) -> tuple[Array, DraftCount]:
    """[seeds, LENGTH] tokens, and the drafts that were decided on."""
    found, drafted = [], DraftCount()
    for seed in seeds:
        request = Request(
            prompt=(0,), max_tokens=LENGTH, sampling=replace(how, top_k=IDS, seed=seed)
        )
        tokens: list[int] = []
        for chunk in s.run(request, proposer):
            if chunk.tokens and isinstance(proposer, DflashDrafter):
                drafted.decided(s, how, chunk.tokens)
            tokens += chunk.tokens
        found.append(tokens)
    return np.array(found), drafted
