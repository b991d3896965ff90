"""`thor-dflash doctor`: what this machine is fit for, and how to put right what is not."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import asdict
from typing import TYPE_CHECKING

import thor_dflash
from thor_dflash.config import Config
from thor_dflash.progress import Progress

if TYPE_CHECKING:
    from thor_dflash.runtime.doctor.examine import Report

WIDE = 16
"""Of the first column."""


def run(args: Namespace, config: Config, progress: Progress) -> int:
    """Examine and print; 1 where something is wrong."""
    from thor_dflash.runtime.doctor.examine import examine
    from thor_dflash.runtime.doctor.here import Here

    with progress.task("examining this machine"):
        report = examine(Here(), config.engine, args.package)
    progress.close()
    print(as_json(report) if args.json else table(report))
    return 1 if report.wrong else 0


def table(report: Report) -> str:
    """A line an item, the remedy under it, and what can run here."""
    lines = [f"thor-dflash {thor_dflash.__version__}"]
    for finding in report.findings:
        lines.append(f"{finding.state:<5}  {finding.item:<{WIDE}}  {finding.text}")
        if finding.remedy:
            lines.append(f"{'':<5}  {'':<{WIDE}}  -> {finding.remedy}")
    for engine, why in report.engines.items():
        text = f"cannot run here: {why}" if why else "can run here"
        lines.append(f"{'':<5}  {f'engine {engine}':<{WIDE}}  {text}")
    return "\n".join(lines)


def as_json(report: Report) -> str:
    """One object: `wrong`, `engines`, `items`."""
    return json.dumps(
        {
            "thor_dflash": thor_dflash.__version__,
            "wrong": report.wrong,
            "engines": report.engines,
            "items": [asdict(finding) for finding in report.findings],
        },
        indent=1,
    )
