"""What happens, a line of JSON each, for whoever watches a fleet. No prompts and no plans in it."""

from __future__ import annotations

import time
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
        try:
            # Unbuffered: a line is there as soon as the thing has happened.
            self._file = FileIO(path, "ab") if path else None
        except OSError as e:
            raise ConfigError(
                f"serve.events must be a file that can be written (got {path}: {e.strerror})"
            ) from e

    def __call__(self, event: str, **fields: object) -> None:
        """Add a line: the time, s since 1970, the event and its fields that are not null."""
        if self._file is None:
            return
        told = {name: value for name, value in fields.items() if value is not None}
        line = msgspec.json.encode({"t": round(time.time(), 3), "event": event, **told})
        try:
            self._file.write(line + b"\n")
        except OSError:
            self.close()  # a full disk must not end a planner

    def close(self) -> None:
        """Write no more. Idempotent."""
        if self._file is not None:
            self._file.close()
        self._file = None
