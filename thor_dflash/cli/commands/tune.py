"""`thor-dflash tune`: measures the launches of a package on this GPU and keeps the fastest."""

from __future__ import annotations

import json
from argparse import Namespace

from thor_dflash.config.tree import Config
from thor_dflash.core import strict_records
from thor_dflash.core.errors import ConfigError
from thor_dflash.core.progress import Progress, amount


def run(args: Namespace, config: Config, progress: Progress) -> None:
    """Measure what the record of this device lacks, write the record, print what was chosen."""
    from thor_dflash.runtime.measure.tune import table, tune_package

    if args.budget_s is not None and args.budget_s < 1:
        raise ConfigError(f"--budget-s must be at least 1 (got {args.budget_s})")
    if config.engine.tune == "off":
        raise ConfigError("engine.tune must be auto or required to tune (got off)")
    budget = {} if args.budget_s is None else {"budget": float(args.budget_s)}
    done = tune_package(args.package, config.engine, progress, again=args.again, **budget)
    progress.close()
    if args.json:
        print(json.dumps(strict_records.encode(done.record), indent=1))
        return
    print(table(done.record, explain=args.explain))
    text = f"{len(done.measured)} measured now in {done.seconds:.0f} s: {done.path}"
    if done.left:
        text += f"; {amount(done.left, 'launches')} are left: tune again"
    print(text)
