"""Standard streams that are closed or cannot be written; signals that end a server."""

from __future__ import annotations

import io
import os
import signal
import sys
from typing import TextIO, cast

STDERR = 2


def prepare() -> None:
    """Make the standard streams usable: one that is closed becomes the null device, because the
    next opened file would get its number, and a library's stderr output would end up in it.
    """
    while (handle := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(handle, True)
    os.close(handle)
    stdout: object = sys.stdout
    stderr: object = sys.stderr
    if stdout is None:  # Python sets this if the shell closed it (>&-)
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    elif isinstance(stdout, io.TextIOWrapper):
        # Print ? for characters that the terminal's encoding lacks, instead of failing.
        cast("io.TextIOWrapper[io.BufferedWriter]", stdout).reconfigure(errors="replace")
    if stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def shutdown_signals() -> tuple[signal.Signals, ...]:
    """Signals at which a server shuts down in order. SIGHUP, from a terminal that closes, is one of
    them unless it is ignored already (nohup).
    """
    ends = (signal.SIGTERM, signal.SIGINT)
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return ends if ignored else (*ends, signal.SIGHUP)


def is_broken(stream: TextIO) -> bool:
    """Whether the stream cannot be written. Tries one more write, because its buffer forgets a
    large write that failed.
    """
    try:
        print(file=stream, flush=True)
    except OSError:
        discard(stream)
        return True
    return False


def settle(stream: TextIO) -> None:
    """Flush a stream; discard it if it cannot be written, because its buffer keeps what could not
    be written, and if Python's flush at exit fails, the exit status becomes 120.
    """
    try:
        stream.flush()
    except OSError:
        discard(stream)


def discard(stream: TextIO) -> None:
    """Redirect a stream to the null device, so that Python's flush at exit succeeds."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
