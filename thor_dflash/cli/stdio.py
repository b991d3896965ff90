"""Standard streams that cannot be written; signals that end a server."""

from __future__ import annotations

import io
import os
import signal
from typing import TextIO


def shutdown_signals() -> tuple[signal.Signals, ...]:
    """Signals at which a server shuts down in order. SIGHUP, from a terminal that closes, is one of
    them unless it is ignored already (nohup).
    """
    ends = (signal.SIGTERM, signal.SIGINT)
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return ends if ignored else (*ends, signal.SIGHUP)


def escape_unencodable(stream: TextIO) -> None:
    """Let a stream escape what its encoding lacks, as stderr does: in the locale C an umlaut, and
    anywhere a path that is not UTF-8, must not end a command.
    """
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")


def settle(stream: TextIO) -> None:
    """Flush a stream. If it cannot be written, redirect it to the null device: its buffer keeps
    what could not be written, and if Python's flush at exit fails, the exit status becomes 120.
    """
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
