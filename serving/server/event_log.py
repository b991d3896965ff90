"""A log of the server's events for monitoring, one JSON line each, without prompts or plans."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from io import FileIO

import msgspec

from thor_dflash.core.errors import ConfigError


class EventLog:
    """An append-only file. Written only by the I/O thread."""

    def __init__(self, path: str) -> None:
        """Open the file; with "" nothing is written.

        Raises:
            ConfigError: the file cannot be written.
        """
        self._lost = 0
        """Lines that failed to be written since the last successful one."""
        try:
            # Unbuffered: each line is in the file as soon as its event has happened.
            self._file = FileIO(path, "ab", opener=_opened) if path else None
        except OSError as e:
            raise ConfigError(
                f"serve.events must be a file that can be written (got {path}: {e.strerror})"
            ) from e

    def __call__(self, event: str, **fields: object) -> None:
        """Add a line: the time, s since 1970, the event, and its fields that are not None."""
        if self._file is None:
            return
        lines = _line(event, fields)
        if self._lost:
            lines = _line("lost", {"lines": self._lost}) + lines
        self._lost = 0 if _wrote(self._file, lines) else self._lost + 1

    def close(self) -> None:
        """Close the file; later events are not written. Idempotent."""
        if self._file is not None:
            self._file.close()
        self._file = None


def _opened(path: str, flags: int) -> int:
    # Non-blocking: if the path is a pipe, the server must not wait for a missing or slow reader.
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


def _line(event: str, fields: dict[str, object]) -> bytes:
    told = {name: value for name, value in fields.items() if value is not None}
    return msgspec.json.encode({"t": round(time.time(), 3), "event": event, **told}) + b"\n"


def _wrote(file: FileIO, lines: bytes) -> bool:
    """Write and return whether all of it was written. A full disk must not end the server."""
    try:
        done = file.write(lines) or 0
    except OSError:
        return False
    if done < len(lines):
        with suppress(OSError):  # a pipe cannot take back the part that was written
            file.truncate(file.tell() - done)
    return done == len(lines)
