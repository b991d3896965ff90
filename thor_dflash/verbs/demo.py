"""`thor-dflash demo`: runs the planner that ships with the repository."""

from __future__ import annotations

from argparse import Namespace

from thor_dflash.config import Config
from thor_dflash.progress import Progress
from thor_dflash.verbs import idle


def run(args: Namespace, config: Config, progress: Progress) -> None:
    """Build the small model and plan one task."""
    from thor_dflash.extras import extra

    idle.refuse_tensorrt(args.set, config.build.engine)
    idle.refuse_engine(args.set, [config.build.engine])
    with extra("build"):
        from thor_dflash.calib import demo

    demo.run(config, progress)
