"""What a reduced draft vocabulary gives, the head's bytes, against what it costs, accept length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from thor_dflash.builders.checkpoint.drafter import read_drafter
from thor_dflash.builders.checkpoint.quantized_matrix import WeightFormat
from thor_dflash.builders.checkpoint.shards import TensorEntry
from thor_dflash.builders.checkpoint.target import EMBEDDING, HEAD, read_target
from thor_dflash.calib.draft_vocab.selection import Candidates, Coverage
from thor_dflash.calib.quantize.linear_rows import LinearRows, ShardReader
from thor_dflash.calib.quantize.plan_report import THOR

STEPS = 16
"""Sizes are tried in steps of this part of the vocabulary."""
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
    """How much shorter the accept length is, a share: see `loss`."""

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
    own = sum(_size(shards.entry(n)) for n in shards if n != table and n not in model.skipped)
    own += sum(_size(draft.shards.entry(name)) for name in draft.shards)
    with ShardReader(shards) as reader:
        head = LinearRows.of(reader, model.linears[HEAD])
    rows, columns = head.shape
    row = columns * BYTES.get(head.kind, 2.0)
    # A head of its own is counted once by its tensors, a tied one not at all.
    passes = 2 if model.dims.tied else 1
    return CycleCost(rows, row, own + passes * rows * row, draft.dims.block)


def _size(entry: TensorEntry) -> int:
    return entry.end - entry.begin


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


def loss(length: float, covered: float, block: int) -> float:
    """By how much the accept length falls, a share, if drafts are right independently of each other
    and of the list: an estimate.
    """
    right = probability(length, block)
    return 1 - accept_length(right * covered, block) / accept_length(right, block)


def trade_off(found: Candidates, cost: CycleCost, length: float, size: int) -> TradeOff:
    """What a list of this size gives."""
    coverage = found.coverage(size)
    return TradeOff(
        size,
        coverage,
        1e3 * size * cost.row / THOR,
        cost.saved(size),
        loss(length, coverage["all"].share, cost.block),
    )


def sizes(found: Candidates, vocab: int) -> list[int]:
    """Sizes to try: as few ids as must be there, then steps up to three quarters of all."""
    least = len(found.forced) + len(found.forced) % 2
    step = max(2, 2 * math.ceil(vocab / STEPS / 2))
    most = min(len(found.ids), 3 * vocab // 4)
    return sorted({least, *(n for n in range(step, most, step) if n > least)})


def best(rows: Sequence[TradeOff]) -> TradeOff | None:
    """The fastest size, or None if all of them lose."""
    found = max(rows, key=lambda row: row.speed, default=None)
    return found if found is not None and found.speed > 1 else None
