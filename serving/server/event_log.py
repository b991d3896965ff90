"""A log of the server's events for monitoring, one JSON line each, without prompts or plans."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from io import FileIO
from logging.handlers import QueueHandler, QueueListener
from queue import SimpleQueue
from typing import Any

import msgspec

from thor_dflash.core.errors import ConfigError

MAX_QUEUED = 4096
"""Most events that wait for the disk; later ones are lost and counted."""


class EventLog:
    """Appends events to a file, on a thread of its own, so that the I/O thread never waits for the
    disk.
    """

    def __init__(self, path: str) -> None:
        """Open the file; with "" nothing is written.

        Raises:
            ConfigError: the file cannot be written.
        """
        self._queue = BoundedQueueHandler(SimpleQueue[Any]())
        self._file = JsonLinesHandler(path) if path else None
        self._listener: QueueListener | None = None

    def start(self) -> None:
        """Start the thread that writes."""
        if self._file is not None:
            self._listener = QueueListener(self._queue.queue, self._file)
            self._listener.start()

    def __call__(self, event: str, **fields: object) -> None:
        """Add a line: the time, s since 1970, the event, and its fields that are not None."""
        if self._listener is not None:
            self._queue.handle(logging.makeLogRecord({"msg": event, "fields": fields}))

    def close(self) -> None:
        """Write the queued events and close the file; later events are not written. Idempotent."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.stop()
        if self._file is not None:
            self._file.close()


class BoundedQueueHandler(QueueHandler):
    """Loses a record rather than wait or grow; the next one that is queued says how many."""

    lost = 0

    def enqueue(self, record: logging.LogRecord) -> None:
        """Queue a record unless the queue is full."""
        queue: Any = self.queue
        if queue.qsize() >= MAX_QUEUED:
            self.lost += 1
            return
        record.lost, self.lost = self.lost, 0
        queue.put(record)


class JsonLinesHandler(logging.Handler):
    """Appends each record to a file as a JSON line. A full disk or a slow reader of a pipe must not
    end or delay the server: the line is lost, and the next one that is written says how many were.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self._lost = 0
        try:
            # Unbuffered: each line is in the file at once.
            self._file = FileIO(path, "ab", opener=_open)
        except OSError as e:
            raise ConfigError(
                f"serve.events must be a file that can be written (got {path}: {e.strerror})"
            ) from e

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line of a record."""
        fields: dict[str, object] = vars(record)["fields"]
        lines = _line(record.created, record.msg, fields)
        self._lost += vars(record).get("lost", 0)
        if self._lost:
            lines = _line(record.created, "lost", {"lines": self._lost}) + lines
        self._lost = 0 if self._write(lines) else self._lost + 1

    def _write(self, lines: bytes) -> bool:
        """Return whether all of it was written."""
        try:
            done = self._file.write(lines) or 0
        except OSError:
            return False
        if done < len(lines):
            with suppress(OSError):  # a pipe cannot take back the part that was written
                self._file.truncate(self._file.tell() - done)
        return done == len(lines)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()


def _open(path: str, flags: int) -> int:
    # Non-blocking: if the path is a pipe, the server must not wait for a missing or slow reader.
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


def _line(time: float, event: str, fields: dict[str, object]) -> bytes:
    given = {name: value for name, value in fields.items() if value is not None}
    return msgspec.json.encode({"t": round(time, 3), "event": event, **given}) + b"\n"
