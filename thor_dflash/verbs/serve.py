"""`thor-dflash serve`: plans over ZeroMQ, until SIGTERM."""

from __future__ import annotations

import os
import signal
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from thor_dflash.config import Config
from thor_dflash.errors import ThorError
from thor_dflash.progress import Progress

if TYPE_CHECKING:
    from thor_dflash.serving.backend import Backend
    from thor_dflash.serving.server import Server
    from thor_dflash.serving.shelf import Shelf

SWITCH_S = 0.0005
"""How long the engine thread may keep the interpreter from the I/O thread. Python's own 5 ms would
be most of what a control operation may take."""


def run(args: Namespace, config: Config, progress: Progress) -> None:
    """Serve on this thread; SIGTERM and SIGINT drain, a second one ends."""
    from thor_dflash.extras import extra

    with extra("serve"):
        from thor_dflash.serving.server import Server
        from thor_dflash.serving.systemd import notifier

    log = Log(sys.stderr)
    server = Server(
        lambda: _load(args, config, progress, log), config.serve, log=log, notify=notifier()
    )
    sys.setswitchinterval(SWITCH_S)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda signum, frame: server.stop())
    log(f"listening on {', '.join(server.endpoints)}")
    _until_stopped(server, progress, log)


def _until_stopped(server: Server, progress: Progress, log: Log) -> None:
    status = 0
    try:
        server.run()
    except ThorError as e:
        if server.ended():
            raise
        log(f"thor-dflash: {' '.join(str(e).split())}")
        status = 2
    if not server.ended():
        # The interpreter's end would take a thread out of the midst of a library's code, to which
        # that is a fault: it aborts. What is open is as a SIGKILL may leave it.
        progress.close()
        os._exit(status)


@dataclass(slots=True)
class Log:
    """Lines to a stream, past its buffer. One that cannot be written is dropped and counted:
    neither a full disk nor a reader that is gone may end a planner.
    """

    stream: TextIO
    lost: int = 0

    def __call__(self, text: str) -> None:
        """Write a line, or the lines of a traceback."""
        line = text.rstrip() + "\n"
        if self.lost:
            line = f"{self.lost} lines of this log could not be written\n{line}"
        try:
            os.write(self.stream.fileno(), line.encode(errors="backslashreplace"))
            self.lost = 0
        except OSError:
            self.lost += 1


def _load(
    args: Namespace, config: Config, progress: Progress, log: Callable[[str], None]
) -> Backend:
    # First: a model is long in loading, and another server may have the directory.
    shelf = _shelf(config.serve.prefix_dir) if config.serve.prefix_dir else None
    if args.mock:
        from thor_dflash.serving.mock import MockBackend

        return MockBackend(config.serve, (args.mock_cycle_ms or 0.0) / 1e3, shelf)
    from thor_dflash.runtime.session import open_session
    from thor_dflash.serving.live import LiveBackend

    try:
        session = open_session(args.package, config.engine, progress, choose=True)
        progress.close()
        return LiveBackend(session, config.serve, log, shelf)
    except BaseException:
        if shelf is not None:
            shelf.close()
        raise


def _shelf(directory: str) -> Shelf:
    from thor_dflash.serving.shelf import Shelf

    return Shelf(Path(directory))
