"""`thor-dflash demo`: runs the planner that ships with the repository."""

from __future__ import annotations

from argparse import Namespace

from thor_dflash.cli import option_checks
from thor_dflash.config.tree import Config
from thor_dflash.core.progress import Progress


def run(args: Namespace, config: Config, progress: Progress) -> None:
    """Build the small model and plan one task."""
    from thor_dflash.core.extras import extra

    option_checks.refuse_tensorrt(args.set, config.build.engine)
    option_checks.refuse_engine(args.set, [config.build.engine])
    with extra("build"):
        from thor_dflash.calib import demo

    demo.run(config, progress)
