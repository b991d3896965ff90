"""Standard streams that cannot be written; signals that end a server."""

from __future__ import annotations

import io
import os
import signal
import sys
from typing import TextIO


def shutdown_signals() -> tuple[signal.Signals, ...]:
    """Signals at which a server shuts down in order. SIGHUP, from a terminal that closes, is one of
    them unless it is ignored already (nohup).
    """
    ends = (signal.SIGTERM, signal.SIGINT)
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return ends if ignored else (*ends, signal.SIGHUP)


def open_closed() -> None:
    """Open each standard stream that is closed (`>&-`, some supervisors) on the null device. Its
    descriptor would go to the next file or socket, which would then be read and written as one.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number: this one
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


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
