"""`thor-dflash serve`: plans over ZeroMQ, until SIGTERM."""

from __future__ import annotations

import signal
import sys
from argparse import Namespace
from typing import TYPE_CHECKING

from thor_dflash.config import Config
from thor_dflash.progress import Progress

if TYPE_CHECKING:
    from thor_dflash.serving.backend import Backend

SWITCH_S = 0.0005
"""How long the engine thread may keep the interpreter from the I/O thread. Python's own 5 ms would
be most of what a control operation may take."""


def run(args: Namespace, config: Config, progress: Progress) -> None:
    """Serve on this thread; SIGTERM and SIGINT drain, a second one ends."""
    from thor_dflash.extras import extra

    with extra("serve"):
        from thor_dflash.serving.server import Server
        from thor_dflash.serving.systemd import notifier

    server = Server(
        lambda: _load(args, config, progress), config.serve, log=_log, notify=notifier()
    )
    sys.setswitchinterval(SWITCH_S)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda signum, frame: server.stop())
    _log(f"listening on {', '.join(server.endpoints)}")
    server.run()


def _load(args: Namespace, config: Config, progress: Progress) -> Backend:
    if args.mock:
        from thor_dflash.serving.mock import MockBackend

        return MockBackend(config.serve, args.mock_cycle_ms / 1e3)
    from thor_dflash.runtime.session import open_session
    from thor_dflash.serving.live import LiveBackend

    session = open_session(args.package, config.engine, progress, choose=True)
    progress.close()
    return LiveBackend(session, config.serve, _log)


def _log(text: str) -> None:
    print(text.rstrip(), file=sys.stderr, flush=True)
