"""`quantize`: one checkpoint directory in, one out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from thor_dflash import calib
from thor_dflash.builders.checkpoint.drafter import DrafterCheckpoint, read_drafter
from thor_dflash.builders.checkpoint.json_fields import Fields
from thor_dflash.builders.checkpoint.target import TargetCheckpoint, read_target
from thor_dflash.builders.resume_key import code, inventory
from thor_dflash.calib.quantize.cache_scales import CacheScales
from thor_dflash.calib.quantize.linear_rows import ShardReader, TensorReader
from thor_dflash.calib.quantize.metadata import CONFIG, PRODUCER, REPORT, metadata, small_files
from thor_dflash.calib.quantize.plan import QuantizePlan
from thor_dflash.calib.quantize.quantize import encoder, quantize
from thor_dflash.calib.quantize.staged_checkpoint import Row, StagedCheckpoint
from thor_dflash.core.progress import Progress


@dataclass(frozen=True, slots=True)
class QuantizeReport:
    """What a run found; also written into the checkpoint."""

    producer: dict[str, str]
    settings: dict[str, object]
    zero: tuple[str, ...]
    """Linears whose weights are all zero: scale 1, where modelopt writes NaN."""
    flushed: dict[str, int]
    """Linear -> blocks that are not zero but have the smallest scale."""
    subnormal: tuple[str, ...]
    """Linears whose second scale is a subnormal number."""
    rounded_twice: tuple[str, ...]
    dropped: tuple[str, ...]
    """Stored scales that were not written."""
    statistics: dict[str, str]
    """What the statistics' file holds of its making, and its hash; empty without one."""
    cache: tuple[CacheScales, ...]
    """Calibrated scales of the KV cache, by layer."""


def read_source(target: Path | None, drafter: Path | None) -> TargetCheckpoint | DrafterCheckpoint:
    """Read the headers of the one of the two that is given.

    Raises: CheckpointError.
    """
    if target is not None:
        return read_target(target)
    assert drafter is not None
    return read_drafter(drafter)


def write(plan: QuantizePlan, out: Path, progress: Progress) -> QuantizeReport:
    """Write the checkpoint of a plan into the new directory `out`, or finish it after a stop.

    Raises:
        CheckpointError: a weight is infinite or NaN; nothing stays.
        ConfigError: `out` cannot be written, or its disk is too small.
        EngineError: there is no GPU, and the plan wants one.
    """
    directory = plan.source.directory
    config = Fields.read(directory / CONFIG).values
    small = {path.name: path.read_bytes() for path in small_files(directory)}
    with ShardReader(plan.source.shards) as reader:
        source = "\n".join(inventory(directory))
        return write_tensors(plan, reader, config, source, out, progress, small)


def write_tensors(
    plan: QuantizePlan,
    reader: TensorReader,
    config: Mapping[str, object],
    source: str,
    out: Path,
    progress: Progress,
    small: Mapping[str, bytes] | None = None,
) -> QuantizeReport:
    """Write the tensors that a reader gives.

    config: what config.json holds besides the quantisation.
    source: what decides the tensors' bytes; a run that was stopped continues if it is the same.
    small: further files.
    Raises: as `write`.
    """
    # Any number of threads, and a GPU, write the same bytes.
    settings = {**asdict(plan.config), "threads": 0, "device": "cpu", **_statistics(plan)}
    own = code(Path(calib.__path__[0]) / "quantize", Path(calib.__path__[0]) / "synthetic")
    key = "\n".join([repr(settings), own, source]).encode(errors="surrogateescape")
    name = hashlib.sha256(key).hexdigest()
    with encoder(plan) as gpu, StagedCheckpoint(out, plan.files, name) as stage:
        rows = quantize(plan, reader, stage, progress, gpu)
        report = _report(plan, rows)
        text = json.dumps(asdict(report), indent=2, ensure_ascii=False) + "\n"
        stage.finish({**(small or {}), **metadata(plan, config), REPORT: text.encode()})
    return report


def _statistics(plan: QuantizePlan) -> dict[str, str]:
    if plan.statistics is None:
        return {}
    return {**plan.statistics.metadata, "sha256": plan.statistics.sha256}


def _report(plan: QuantizePlan, rows: Iterable[Row]) -> QuantizeReport:
    found = list(rows)
    settings: dict[str, object] = asdict(plan.config)
    del settings["threads"], settings["device"]
    return QuantizeReport(
        producer=PRODUCER,
        settings=settings,
        zero=tuple(name for row in found for name in row["zero"]),
        flushed={name: n for row in found for name, n in row["flushed"].items()},
        subnormal=tuple(name for row in found for name in row["tiny"]),
        rounded_twice=plan.twice,
        dropped=plan.dropped,
        statistics=_statistics(plan),
        cache=plan.cache,
    )
