"""`thor-dflash serve`: serves plans over ZeroMQ until SIGTERM."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from queue import Full, Queue
from typing import TYPE_CHECKING, TextIO

from thor_dflash.cli import stdio
from thor_dflash.config.engine import EngineConfig
from thor_dflash.config.tree import Config
from thor_dflash.core import strict_records
from thor_dflash.core.errors import ConfigError, ThorError
from thor_dflash.core.message_text import one_line, visible
from thor_dflash.core.progress import Lines, Progress, amount

if TYPE_CHECKING:
    from thor_dflash.serving.planner.backend import Backend
    from thor_dflash.serving.planner.prefix_store import PrefixStore
    from thor_dflash.serving.server.server import Server

TUNE = """
import os, sys, threading
threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start()
from thor_dflash.cli.main import main
sys.exit(main())
"""
"""The command line, in a new process of this interpreter, which ends when its input does: with the
server, however that ends."""
SWITCH_S = 0.0005
"""Longest time that the engine thread may hold the GIL before the I/O thread gets it. Python's
default of 5 ms would be most of the time limit of a control operation."""
HELD = 256
"""Maximum lines of the log that wait to be written."""
LAYOUT = "\n\t"
"""Unprintable characters that the log keeps, for tracebacks."""
DESCRIPTORS = 64
"""Least limit of open files: loading and serving a package take 24."""
LAST_S = 0.2
"""Seconds that a reader of the log gets for the last lines at the end."""


def run(args: Namespace, config: Config, progress: Progress) -> None:
    """Serve on this thread. SIGTERM, SIGINT or SIGHUP drains the server; a second one ends it."""
    from thor_dflash.core.extras import extra

    with extra("serve"):
        from thor_dflash.serving.server.server import Server
        from thor_dflash.serving.server.systemd import notifier

    _check_descriptors()
    log = Log(sys.stderr)
    if isinstance(progress, Lines):
        progress = Lines(log)

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
    for number in stdio.shutdown_signals():
        signal.signal(number, lambda signum, frame: server.stop())
    log(f"listening on {', '.join(server.endpoints)}")
    _until_stopped(server, progress, log)


def _check_descriptors() -> None:
    """Refuse a limit under which libzmq would end the process without a message of ours.

    Raises:
        ConfigError: the limit is too low.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < DESCRIPTORS:
        raise ConfigError(
            f"a server must be allowed {DESCRIPTORS} open files, and one more for each client "
            f"(got {limit}); ulimit -n 1024"
        )


def _until_stopped(server: Server, progress: Progress, log: Log) -> None:
    status = 0
    try:
        server.run()
        log("stopped")
    except ThorError as e:
        if server.ended() and log.close():
            raise
        log(f"thor-dflash: {one_line(str(e))}")
        status = 2
    # If the log's reader is stuck, any further output on stderr would block.
    if not log.close() or not server.ended():
        # The interpreter's exit could kill a thread inside library code, which would then abort.
        # So exit at once; open files are left as after a SIGKILL.
        progress.close()
        os._exit(status)


class Log:
    """Writes lines unbuffered to a stream on its own thread. A line that cannot be written is
    dropped: a full disk, a lost reader or a reader that does not read must not block or end a
    planner. After a reader that was slow, the next line says how many were dropped.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lines: Queue[bytes | None] = Queue(HELD)
        self._lost = 0
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def __call__(self, text: str) -> None:
        """Queue a line, or the lines of a traceback, after the time in UTC. Thread-safe; never
        blocks.
        """
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = f"{now} {visible(text.rstrip(), keep=LAYOUT)}\n"
        if self._lost:
            line = f"{now} {amount(self._lost, 'lines')} before this one were lost\n{line}"
        try:
            self._lines.put_nowait(line.encode())
            self._lost = 0
        except Full:
            self._lost += 1

    def write(self, text: str) -> None:
        """Queue a line, as a stream that progress is printed to."""
        self(text)

    def flush(self) -> None:
        """Do nothing: lines are written as they come."""

    def close(self) -> bool:
        """Wait at most LAST_S for the last lines; return whether the thread has finished."""
        with suppress(Full):
            self._lines.put_nowait(None)
        self._thread.join(LAST_S)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (line := self._lines.get()) is not None:
            with suppress(OSError):
                while line:
                    line = line[os.write(self._stream.fileno(), line) :]


def _load(
    args: Namespace, config: Config, progress: Progress, log: Callable[[str], None]
) -> Backend:
    if args.mock:
        from thor_dflash.serving.planner.mock_backend import MockBackend

        return MockBackend(config.serve, (args.mock_cycle_ms or 0.0) / 1e3)
    # First, because loading a model takes long and another server may be using the directory.
    prefix_store = _prefix_store(config.serve.prefix_dir) if config.serve.prefix_dir else None
    from thor_dflash.runtime.session import open_session
    from thor_dflash.serving.planner.session_backend import SessionBackend

    try:
        _tune(args.package, config.engine, log)
        reuse = 0 if config.serve.reuse == "off" else config.serve.reuse_mb << 20
        session = open_session(args.package, config.engine, progress, choose=True, reuse=reuse)
        return SessionBackend(session, config.serve, log, prefix_store, progress)
    except BaseException:
        if prefix_store is not None:
            prefix_store.close()
        raise


def _tune(package: Path, config: EngineConfig, log: Callable[[str], None]) -> None:
    """Measure the launches of a package of engine cuda that were not measured on this device,
    unless `engine.tune` is another than auto. If the budget ends it, the next start goes on. In a
    process of its own: a launch that fails would break CUDA for this one, which can serve by the
    rules.
    """
    from thor_dflash.package import manifest

    if config.tune != "auto" or manifest.read(package).engine != "cuda":
        return
    from thor_dflash.runtime.measure.tune import needed

    if not needed(package, config):
        return
    command = [sys.executable, "-c", TUNE, "tune", "--package", str(package)]
    default = strict_records.encode(EngineConfig())
    for key, value in strict_records.encode(config).items():
        command += ["--set", f"engine.{key}={json.dumps(value)}"] if value != default[key] else []
    log("measuring launches, up to two minutes, once; --set engine.tune=off uses the rules'")
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace",
    ) as child:  # fmt: skip
        for line in child.stdout or ():
            log(f"tune: {line.rstrip()}")
    if child.returncode:
        log(f"tuning failed with status {child.returncode}: launches by the rules")


def _prefix_store(directory: str) -> PrefixStore:
    from thor_dflash.serving.planner.prefix_store import PrefixStore

    return PrefixStore(Path(directory))
