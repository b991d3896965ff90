"""A log of the server's events for monitoring, one JSON line each, without prompts or plans.

A thread of its own writes, so that the I/O thread never waits for the disk. Not by `logging`: a
record through QueueHandler and QueueListener costs more than the write that it moves away.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from queue import SimpleQueue

import msgspec

from thor_dflash.core.errors import ConfigError

BATCH_S = 0.1
"""Longest time that an event waits before it is written: the thread wakes once for all of them, or
it would contend with the others for the interpreter at each event of a plan."""


LOG_S = 60.0
"""Shortest time between two lines of the log that say that events are lost."""


class EventLog:
    """Called by the I/O thread only."""

    def __init__(self, path: str, log: Callable[[str], None] = print) -> None:
        """Open the file; with "" nothing is written. `log` gets why lines are lost.

        Raises:
            ConfigError: the file cannot be written.
        """
        self._file = LineFile(path, log) if path else None
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread that writes."""
        if self._file is not None:
            self._thread = threading.Thread(target=self._run, args=(self._file,), daemon=True)
            self._thread.start()

    def __call__(self, event: str, **fields: object) -> None:
        """Add a line: the time, s since 1970, the event, and its fields that are not None."""
        if self._thread is not None:
            self._queue.put(line(event, fields))

    def _run(self, file: LineFile) -> None:
        while True:
            idle = self._queue.empty()
            if (item := self._queue.get()) is None:
                return
            if idle:
                time.sleep(BATCH_S)
            file.write(item)

    def close(self) -> None:
        """Write what waits and close the file; later events are not written. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join()
        if self._file is not None:
            self._file.close()


class LineFile:
    """A file that lines are appended to. A full disk or a slow reader of a pipe must not end or
    delay the server: the line is lost, the log says so, and the next one that is written says how
    many were.
    """

    def __init__(self, path: str, log: Callable[[str], None] = print) -> None:
        """Open it.

        Raises:
            ConfigError: it cannot be written.
        """
        self._lost = 0
        self._log = log
        self._logged = -math.inf
        try:
            self._file = FileIO(path, "ab", opener=_open)  # unbuffered
        except OSError as e:
            raise ConfigError(
                f"serve.events must be a file that can be written (got {path}: {e.strerror})"
            ) from e

    def write(self, text: bytes) -> None:
        """Append a line."""
        if self._lost:
            text = line("lost", {"lines": self._lost}) + text
        problem = self._write(text)
        self._lost = self._lost + 1 if problem else 0
        if problem and time.monotonic() >= self._logged + LOG_S:
            self._logged = time.monotonic()
            self._log(f"a line of serve.events is lost, and may not be the last one: {problem}")

    def _write(self, text: bytes) -> str:
        """Write all of it or nothing. Returns why it was not written."""
        try:
            done = self._file.write(text) or 0
        except OSError as e:
            return e.strerror or str(e)
        if done < len(text):
            with suppress(OSError):  # a pipe cannot take back the part that was written
                self._file.truncate(self._file.tell() - done)
        return "" if done == len(text) else "there is no space for all of it"

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def line(event: str, fields: dict[str, object]) -> bytes:
    """Encode an event that happens now."""
    given = {name: value for name, value in fields.items() if value is not None}
    return msgspec.json.encode({"t": round(time.time(), 3), "event": event, **given}) + b"\n"


def _open(path: str, flags: int) -> int:
    # Non-blocking: if the path is a pipe, the server must not wait for a missing or slow reader.
    return os.open(path, flags | os.O_NONBLOCK, 0o666)
