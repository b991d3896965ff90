"""`thor-dflash serve`: plans over ZeroMQ, until SIGTERM."""

from __future__ import annotations

import os
import signal
import sys
import threading
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from thor_dflash import streams
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
HELD = 1 << 20
"""Bytes of the log that wait for its reader."""
LAST_S = 0.2
"""What the end leaves a reader of the log for its last lines."""


def run(args: Namespace, config: Config, progress: Progress) -> None:
    """Serve on this thread; SIGTERM, SIGINT and SIGHUP drain, a second one ends."""
    from thor_dflash.extras import extra

    with extra("serve"):
        from thor_dflash.serving.server import Server
        from thor_dflash.serving.systemd import notifier

    log = Log(sys.stderr)

    def die(status: int) -> None:
        log.close()
        os._exit(status)

    server = Server(
        lambda: _load(args, config, progress, log),
        config.serve,
        log=log,
        notify=notifier(),
        die=die,
    )
    sys.setswitchinterval(SWITCH_S)
    for number in streams.endings():
        signal.signal(number, lambda signum, frame: server.stop())
    log(f"listening on {', '.join(server.endpoints)}")
    _until_stopped(server, progress, log)


def _until_stopped(server: Server, progress: Progress, log: Log) -> None:
    status = 0
    try:
        server.run()
    except ThorError as e:
        if server.ended() and log.close():
            raise
        log(f"thor-dflash: {' '.join(str(e).split())}")
        status = 2
    # Whoever has not read the log by now would hold up whatever else is said on stderr.
    if not log.close() or not server.ended():
        # The interpreter's end would take a thread out of the midst of a library's code, to which
        # that is a fault: it aborts. What is open is as a SIGKILL may leave it.
        progress.close()
        os._exit(status)


class Log:
    """Lines to a stream, past its buffer, by a thread of its own. One that cannot be written is
    dropped and counted: neither a full disk nor a reader that is gone, or is there and reads
    nothing, may hold up or end a planner.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._news = threading.Condition()
        self._lines: list[bytes] = []
        self._held = 0
        """Bytes of those lines."""
        self._dropped = 0
        """Lines that came after those and found no room."""
        self._closed = False
        self._lost = 0
        """Lines that the next one that can be written tells of. The thread's."""
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def __call__(self, text: str) -> None:
        """Have a line written, or the lines of a traceback. From any thread; waits for nothing."""
        line = f"{text.rstrip()}\n".encode(errors="backslashreplace")
        with self._news:
            # Once one is dropped all are until the thread has told of it: what is written is in
            # order, and what is missing is where that is said.
            if self._dropped or (self._lines and self._held + len(line) > HELD):
                self._dropped += 1
            else:
                self._lines.append(line)
                self._held += len(line)
            self._news.notify()

    def close(self) -> bool:
        """Leave the last lines a moment; whether they were written, or could not be."""
        with self._news:
            self._closed = True
            self._news.notify()
        self._thread.join(LAST_S)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._lines or self._closed)
                if not self._lines:
                    return
                lines, self._lines, self._held = self._lines, [], 0
                dropped, self._dropped = self._dropped, 0
            for line in lines:
                self._say(line)
            self._lost += dropped
            if self._lost:
                self._say(b"")

    def _say(self, line: bytes) -> None:
        try:
            if self._lost:
                self._put(f"{self._lost} lines of this log could not be written\n".encode())
                self._lost = 0
            self._put(line)
        except OSError:
            self._lost += bool(line)

    def _put(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._stream.fileno(), data) :]


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
