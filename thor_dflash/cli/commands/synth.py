"""`thor-dflash synth`: writes a checkpoint of a published shape with random values."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from thor_dflash.config.tree import Config
from thor_dflash.core.errors import ConfigError
from thor_dflash.core.progress import Progress, amount


def run(args: Namespace, config: Config, progress: Progress) -> None:
    """Print the plan; without --plan, then write the checkpoint.

    Raises:
        ConfigError: an unknown shape; --out is missing or cannot be written.
    """
    from thor_dflash.core.extras import extra

    with extra("build"):
        from thor_dflash.builders.checkpoint.drafter import DrafterCheckpoint
        from thor_dflash.builders.checkpoint.target import TargetCheckpoint
        from thor_dflash.calib.quantize import checkpoint, plan_report
        from thor_dflash.calib.quantize.plan import make_plan
        from thor_dflash.calib.quantize.staged_checkpoint import check_out
        from thor_dflash.calib.synthetic import random_tensors, shapes

    out: Path | None = args.out
    if out is None and not args.plan:
        raise ConfigError("--out must be given, or --plan (got neither)")
    settings = config.quantize
    if settings.preset == "auto":
        settings = replace(settings, preset="keep")
    source: TargetCheckpoint | DrafterCheckpoint
    if args.drafter and args.mtp:
        raise ConfigError("--mtp must go with a target (got --drafter)")
    if args.drafter:
        sizes = shapes.drafter_shape(args.shape, args.layers)
        source, made = random_tensors.random_drafter(sizes), shapes.drafter_config(sizes)
    else:
        dims = shapes.target_shape(args.shape, args.layers)
        source = random_tensors.random_target(dims, mtp=args.mtp)
        made = shapes.target_config(dims)
    plan = make_plan(source, settings, from_quantised=False)
    text = plan_report.table(plan, random=True)
    if out is not None:
        check_out(out)
    if out is not None and not args.plan:
        reader = random_tensors.RandomReader(source.shards, drafter=args.drafter)
        key = json.dumps(made)
        checkpoint.write_tensors(plan, reader, made, key, out, progress)
    progress.close()
    if out is not None and not args.plan:
        files, size = amount(len(plan.files), "files"), amount(plan.nbytes, "bytes")
        print(f"{out}: {files}, {size}, random values")
    print(text)
