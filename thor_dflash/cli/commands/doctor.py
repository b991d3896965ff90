"""`thor-dflash doctor`: checks what this machine can run, and how to fix the rest."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import asdict
from typing import TYPE_CHECKING

import thor_dflash
from thor_dflash.config.tree import Config
from thor_dflash.core.progress import Progress

if TYPE_CHECKING:
    from thor_dflash.runtime.doctor.examine import DoctorReport

WIDE = 16
"""Width of the item column."""


def run(args: Namespace, config: Config, progress: Progress) -> int:
    """Examine and print; return 1 if something is wrong, else 0."""
    from thor_dflash.runtime.doctor.examine import examine
    from thor_dflash.runtime.doctor.local_machine import LocalMachine

    with progress.task("examining this machine"):
        report = examine(LocalMachine(), config.engine, args.package)
    progress.close()
    print(as_json(report) if args.json else table(report))
    return 1 if report.wrong else 0


def table(report: DoctorReport) -> str:
    """A line per item with its remedy below it, then which engines can run here."""
    lines = [f"thor-dflash {thor_dflash.__version__}"]
    for finding in report.findings:
        lines.append(f"{finding.state:<5}  {finding.item:<{WIDE}}  {finding.text}")
        if finding.remedy:
            lines.append(f"{'':<5}  {'':<{WIDE}}  -> {finding.remedy}")
    for engine, why in report.engines.items():
        text = f"cannot run here: {why}" if why else "can run here"
        lines.append(f"{'':<5}  {f'engine {engine}':<{WIDE}}  {text}")
    return "\n".join(lines)


def as_json(report: DoctorReport) -> str:
    """One object: `thor_dflash` (the version), `wrong`, `engines`, `items`."""
    return json.dumps(
        {
            "thor_dflash": thor_dflash.__version__,
            "wrong": report.wrong,
            "engines": report.engines,
            "items": [asdict(finding) for finding in report.findings],
        },
        indent=1,
    )
