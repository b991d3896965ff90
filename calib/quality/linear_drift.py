"""How far the linears of a checkpoint are from those of another one."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from thor_dflash.builders.checkpoint.target import HEAD, read_target
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
    made: list[LinearDrift] = []
    with ShardReader(ours.shards) as ours_read, ShardReader(other.shards) as other_read:
        have = {name: LinearRows.of(ours_read, one) for name, one in ours.linears.items()}
        want = {name: LinearRows.of(other_read, one) for name, one in other.linears.items()}
        for name, rows in have.items():
            if name not in want or want[name].shape != rows.shape:
                raise CheckpointError(
                    f"{candidate} must have the linears of {reference} (got another {name})"
                )
        names = [name for name in have if name != HEAD or not ours.dims.tied]
        with progress.task("comparing weights", len(names), "linears") as bar:
            for name in names:
                rows, error = have[name], _error(have[name], want[name])
                made.append(LinearDrift(name=name, format=rows.kind.value, error=error))
                bar.advance(1)
    return sorted(made, key=lambda one: -one.error)


def _error(have: LinearRows, want: LinearRows) -> float:
    """Norm of the difference over the norm, in float64."""
    off = norm = 0.0
    for first, last in have.chunks():
        a = want.read(first, last).astype(np.float64)
        off += float(np.square(have.read(first, last) - a).sum())
        norm += float(np.square(a).sum())
    return float(np.sqrt(off / norm)) if norm else float(np.sqrt(off))
