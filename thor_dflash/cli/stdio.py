"""Makes stdin, stdout and stderr usable even if they are closed or cannot be written; signals that
end a server.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from typing import TextIO, cast

from thor_dflash.core.errors import ConfigError

STDERR = 2


def prepare() -> None:
    """Make the three standard streams usable.

    Raises:
        ConfigError: stdout is closed, so there is nowhere to write the result.
    """
    stdout: object = sys.stdout
    stderr: object = sys.stderr
    _fill()
    if stderr is None:  # Python sets this if the shell closed it (2>&-)
        sys.stderr = open(STDERR, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115
    if stdout is None:
        raise ConfigError("stdout must be writable (got: it is closed)")
    if isinstance(stdout, io.TextIOWrapper):
        # Print ? for characters that the terminal's encoding lacks, instead of failing.
        cast("io.TextIOWrapper[io.BufferedWriter]", stdout).reconfigure(errors="replace")


def endings() -> tuple[signal.Signals, ...]:
    """Signals that tell a server to shut down in order. SIGHUP, from a terminal that closes, is
    one of them unless it is ignored already (nohup).
    """
    ends = (signal.SIGTERM, signal.SIGINT)
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return ends if ignored else (*ends, signal.SIGHUP)


def _fill() -> None:
    """Open those of the first three descriptors that are closed. Otherwise the next opened file
    would get such a number, and a library's stderr output would end up in it.
    """
    while (handle := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(handle, True)
    os.close(handle)


def refuses(stream: TextIO) -> bool:
    """Whether the stream cannot be written. Tries one more write, because its buffer forgets a
    large write that failed.
    """
    try:
        print(file=stream, flush=True)
    except OSError:
        leave(stream)
        return True
    return False


def settle(stream: TextIO) -> None:
    """Flush a stream; leave it if it cannot be written, because its buffer keeps what could not be
    written, and if Python's flush at exit fails, the exit status becomes 120.
    """
    try:
        stream.flush()
    except OSError:
        leave(stream)


def leave(stream: TextIO) -> None:
    """Redirect a stream to the null device, so that Python's flush at exit succeeds."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
