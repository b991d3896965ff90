"""What happens, a line of JSON each, for whoever watches a fleet. No prompts and no plans in it."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from io import FileIO

import msgspec

from thor_dflash.errors import ConfigError


class Events:
    """A file that is only ever added to. Written by the I/O thread alone."""

    def __init__(self, path: str) -> None:
        """Open it; "" writes nothing.

        Raises:
            ConfigError: it cannot be written.
        """
        self._lost = 0
        """Lines that could not be written since the last one that was."""
        try:
            # Unbuffered: a line is there as soon as the thing has happened.
            self._file = FileIO(path, "ab", opener=_opened) if path else None
        except OSError as e:
            raise ConfigError(
                f"serve.events must be a file that can be written (got {path}: {e.strerror})"
            ) from e

    def __call__(self, event: str, **fields: object) -> None:
        """Add a line: the time, s since 1970, the event and its fields that are not null."""
        if self._file is None:
            return
        lines = _line(event, fields)
        if self._lost:
            lines = _line("lost", {"lines": self._lost}) + lines
        self._lost = 0 if _wrote(self._file, lines) else self._lost + 1

    def close(self) -> None:
        """Write no more. Idempotent."""
        if self._file is not None:
            self._file.close()
        self._file = None


def _opened(path: str, flags: int) -> int:
    # A planner waits for no reader of a pipe, nor for one that is slow.
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


def _line(event: str, fields: dict[str, object]) -> bytes:
    told = {name: value for name, value in fields.items() if value is not None}
    return msgspec.json.encode({"t": round(time.time(), 3), "event": event, **told}) + b"\n"


def _wrote(file: FileIO, lines: bytes) -> bool:
    """Whether all of it could be written. A full disk must not end a planner."""
    try:
        done = file.write(lines) or 0
    except OSError:
        return False
    if done < len(lines):
        with suppress(OSError):  # what went into a pipe is gone
            file.truncate(file.tell() - done)
    return done == len(lines)
