"""What a reduced draft vocabulary gives, the head's bytes, against what it costs, accept length."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from thor_dflash.builders.checkpoint.drafter import read_drafter
from thor_dflash.builders.checkpoint.quantized_matrix import WeightFormat
from thor_dflash.builders.checkpoint.target import EMBEDDING, HEAD, read_target
from thor_dflash.calib.draft_vocab.selection import AnswerTokens, Candidates, Coverage
from thor_dflash.calib.quantize.linear_rows import LinearRows, ShardReader
from thor_dflash.calib.quantize.plan_report import THOR

STEPS = 16
"""Sizes are tried in steps of this part of the vocabulary."""
LOSS = 0.01
"""A list that loses more of the accept length is never recommended."""
WORTH = 1.002
"""Speed, over that with all ids, below which a list is not worth having."""
BYTES = {WeightFormat.NVFP4: 9 / 16, WeightFormat.FP8: 1.0, WeightFormat.F32: 4.0}
"""Bytes of a weight, scales included; of the others 2."""


@dataclass(frozen=True, slots=True)
class CycleCost:
    """What a cycle reads, from the checkpoints."""

    ids: int
    """Rows of the drafter's head without a list."""
    row: float
    """Bytes of one row."""
    cycle: float
    """Bytes of a whole cycle: both models' weights once, the head twice."""
    block: int

    def saved(self, size: int) -> float:
        """Share of a cycle's bytes that a list of this size saves."""
        return (self.ids - size) * self.row / self.cycle


@dataclass(frozen=True, slots=True)
class TradeOff:
    """One size of a list."""

    size: int
    coverage: dict[str, Coverage]
    head_ms: float
    """Predicted time of the drafter's head on a Thor."""
    gain: float
    """How much shorter a cycle is, a share."""
    loss: float
    """How much shorter the accept length is, a share."""

    @property
    def speed(self) -> float:
        """Tokens a second over those without a list."""
        return (1 - self.loss) / (1 - self.gain)


def cycle_cost(target: Path, drafter: Path) -> CycleCost:
    """Count the bytes of a cycle.

    Raises:
        CheckpointError: one is no supported checkpoint.
    """
    model, draft = read_target(target), read_drafter(drafter)
    shards = model.shards
    table = model.prefix + EMBEDDING
    own = sum(shards.entry(n).nbytes for n in shards if n != table and n not in model.skipped)
    own += sum(draft.shards.entry(name).nbytes for name in draft.shards)
    with ShardReader(shards) as reader:
        head = LinearRows.of(reader, model.linears[HEAD])
    rows, columns = head.shape
    row = columns * BYTES.get(head.kind, 2.0)
    # A head of its own is counted once by its tensors, a tied one not at all.
    passes = 2 if model.dims.tied else 1
    return CycleCost(rows, row, own + passes * rows * row, draft.dims.block)


def accept_length(right: float, block: int) -> float:
    """Expected tokens of a cycle if each draft is right with this probability, given the ones
    before it.
    """
    drafts = block - 1
    return 1 + (drafts if right == 1 else right * (1 - right**drafts) / (1 - right))


def probability(length: float, block: int) -> float:
    """The inverse of `accept_length`, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if accept_length(middle, block) < length else (low, middle)
    return high


def drawn(answer: AnswerTokens, length: float, block: int, seed: int) -> AnswerTokens:
    """The answer as if drafts were right at random, so that cycles commit `length` tokens."""
    rng, right = random.Random(seed), probability(length, block)
    wrong = (i for i in range(len(answer.tokens)) if rng.random() >= right)
    return replace(answer, refused=tuple(wrong))


def cycles(answer: AnswerTokens, kept: Container[int], block: int) -> int:
    """Cycles that write an answer if only these ids are drafted: each ends with the first token
    that cannot be drafted or was drafted otherwise, or with the one after its last draft.
    """
    refused = set(answer.refused)
    count = at = 0
    while at < len(answer.tokens):
        drafts = range(at, min(at + block - 1, len(answer.tokens)))
        stops = (i for i in drafts if i in refused or answer.tokens[i] not in kept)
        at = next(stops, at + block - 1) + 1
        count += 1
    return count


def loss(found: Candidates, size: int, block: int) -> float:
    """By how much the accept length of the held-out answers falls, a share, with a list of this
    size: an estimate, since drafts after a token outside the list may differ.
    """
    kept, every = set(found.ids[:size]), range(2**31)
    whole = sum(cycles(answer, every, block) for answer in found.held)
    return 1 - whole / sum(cycles(answer, kept, block) for answer in found.held)


def trade_off(found: Candidates, cost: CycleCost, size: int) -> TradeOff:
    """What a list of this size gives."""
    return TradeOff(
        size,
        found.coverage(size),
        1e3 * size * cost.row / THOR,
        cost.saved(size),
        loss(found, size, cost.block),
    )


def sizes(found: Candidates, cost: CycleCost) -> list[int]:
    """Sizes to try: as few ids as must be there, steps up to all, and the smallest one that loses
    no more than LOSS.
    """
    least = len(found.forced) + len(found.forced) % 2
    every = range(least, len(found.ids) + 1, 2)
    step = max(2, 2 * math.ceil(cost.ids / STEPS / 2))
    enough = bisect_left(every, -LOSS, key=lambda size: -loss(found, size, cost.block))
    smallest = every[enough : enough + 1]
    return sorted({least, *(n for n in range(step, len(found.ids), step) if n > least), *smallest})


def best(rows: Sequence[TradeOff]) -> TradeOff | None:
    """The fastest size that loses no more than LOSS, or None if it is not worth having."""
    kept = (row for row in rows if row.loss <= LOSS and row.speed >= WORTH)
    return max(kept, key=lambda row: row.speed, default=None)
