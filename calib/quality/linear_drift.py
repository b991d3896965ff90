"""How far the linears of a checkpoint are from those of another one."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from thor_dflash.builders.checkpoint.linear_weights import Linear
from thor_dflash.builders.checkpoint.target import HEAD, TargetCheckpoint, read_target
from thor_dflash.calib.quality.quality_report import LinearDrift
from thor_dflash.calib.quantize.linear_rows import LinearRows, ShardReader
from thor_dflash.core.errors import CheckpointError
from thor_dflash.core.progress import Progress


def drift_of_linears(reference: Path, candidate: Path, progress: Progress) -> list[LinearDrift]:
    """Compare the stored linears of two target checkpoints, the worst first. Reads both once.

    Raises:
        CheckpointError: one is no supported checkpoint, or they are of different models.
    """
    ours, other = read_target(candidate), read_target(reference)
    for name, linear in ours.linears.items():
        if name not in other.linears or _shape(ours, linear) != _shape(other, other.linears[name]):
            raise CheckpointError(
                f"{candidate} must have the linears of {reference} (got another {name})"
            )
    made: list[LinearDrift] = []
    names = [name for name in ours.linears if name != HEAD or not ours.dims.tied]
    with (
        ShardReader(ours.shards) as have,
        ShardReader(other.shards) as want,
        progress.task("comparing weights", len(names), "linears") as bar,
    ):
        for name in names:
            rows = LinearRows.of(have, ours.linears[name])
            error = _error(rows, LinearRows.of(want, other.linears[name]))
            made.append(LinearDrift(name=name, format=rows.kind.value, error=error))
            bar.advance(1)
    return sorted(made, key=lambda one: -one.error)


def _shape(checkpoint: TargetCheckpoint, linear: Linear) -> tuple[int, int]:
    rows, columns = checkpoint.shards.entry(linear.codes).shape
    return rows, columns * (2 if linear.block_scale else 1)


def _error(have: LinearRows, want: LinearRows) -> float:
    """Norm of the difference over the norm, in float64."""
    off = norm = 0.0
    for first, last in have.chunks():
        a = want.read(first, last).astype(np.float64)
        off += float(np.square(have.read(first, last) - a).sum())
        norm += float(np.square(a).sum())
    return float(np.sqrt(off / norm)) if norm else float(np.sqrt(off))
