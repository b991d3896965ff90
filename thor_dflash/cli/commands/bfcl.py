"""`thor-dflash bfcl`: sends tool-call samples to a server and scores the calls."""

from __future__ import annotations

import json
from argparse import Namespace

from thor_dflash.calib.replay import bfcl
from thor_dflash.cli.commands.replay import connected
from thor_dflash.config.tree import Config
from thor_dflash.core import strict_records
from thor_dflash.core.errors import ConfigError, PlanError
from thor_dflash.core.progress import Progress
from thor_dflash.core.text_table import columns


def run(args: Namespace, config: Config, progress: Progress) -> int:
    """Send the samples, print the scores. Status 1 if answers are missing."""
    if args.first is not None and args.first < 1:
        raise ConfigError(f"--first must be at least 1 (got {args.first})")
    samples = bfcl.read_samples(args.samples)[: args.first]
    check = bfcl.judge()
    with (
        connected(args) as (connection, model),
        progress.task("sending samples", len(samples), "samples") as task,
    ):
        verdicts: list[bfcl.BfclVerdict] = []
        for verdict in bfcl.run(connection, model, samples, check):
            verdicts.append(verdict)
            task.advance(1)
    progress.close()
    errors = [verdict.error for verdict in verdicts if verdict.error]
    if len(errors) == len(verdicts):
        raise PlanError("internal", f"the server must answer a sample (got: {errors[0]})")
    found = bfcl.report(verdicts, scored=check is not None)
    if args.json:
        print(json.dumps(strict_records.encode(found)))
    else:
        print(_text(found))
    return 1 if errors else 0


def _text(found: bfcl.BfclReport) -> str:
    rows = {
        "overall": found.overall,
        "normalised": found.normalised,
        **found.categories,
        **{f"  {name}": value for name, value in sorted(found.subsets.items())},
    }
    head = f"{found.samples} samples, {found.failed} without an answer"
    if not found.scored:
        head += (
            "\nnote: not scored, bfcl-eval cannot be imported here: percent of answers whose calls "
            "name declared functions with an object of arguments, or that rightly have none"
        )
    return "\n".join([head, *columns([(name, f"{value:.2f}") for name, value in rows.items()])])
