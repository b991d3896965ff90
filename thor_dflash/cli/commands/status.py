"""`thor-dflash status`: whether a server takes plans, and how its last ones went."""

from __future__ import annotations

import json
from argparse import Namespace

from thor_dflash.cli import plan_server
from thor_dflash.config.tree import Config
from thor_dflash.core.message_text import visible
from thor_dflash.core.progress import Progress

WIDE = 15
"""Width of the first column."""
AT_WORK = ("ready", "busy")


def run(args: Namespace, config: Config, progress: Progress) -> int:
    """Print the state; return 0 if the server takes plans, else 1."""
    with plan_server.connect(args, retries=0, timeout_s=args.wait) as planner:
        report = plan_server.report(planner)
    if args.json:
        print(json.dumps(report.table()))
    elif not args.quiet:
        print("\n".join(f"{fact.name:<{WIDE}}{visible(fact.text)}" for fact in report.facts()))
    return 0 if report.health["state"] in AT_WORK else 1
