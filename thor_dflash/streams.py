"""stdin, stdout and stderr, whatever the shell or the other end made of them; and their end."""

from __future__ import annotations

import io
import os
import signal
import sys
from typing import TextIO, cast

from thor_dflash.errors import ConfigError

STDERR = 2


def prepare() -> None:
    """Make the three streams fit to be used.

    Raises:
        ConfigError: stdout is closed, and what was asked for has nowhere to go.
    """
    stdout: object = sys.stdout
    stderr: object = sys.stderr
    _fill()
    if stderr is None:  # Python's where the shell closed it (2>&-)
        sys.stderr = open(STDERR, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115
    if stdout is None:
        raise ConfigError("stdout must be writable (got: it is closed)")
    if isinstance(stdout, io.TextIOWrapper):
        # A terminal that cannot show a letter shows ? instead of failing.
        cast("io.TextIOWrapper[io.BufferedWriter]", stdout).reconfigure(errors="replace")


def endings() -> tuple[signal.Signals, ...]:
    """Signals that tell a server to end in order. SIGHUP, of a terminal that is closed, is one but
    for whoever asked for it to be ignored (nohup).
    """
    ends = (signal.SIGTERM, signal.SIGINT)
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return ends if ignored else (*ends, signal.SIGHUP)


def _fill() -> None:
    """Open what is closed of the first three descriptors. The next file would have its number, and
    what a library says on stderr would be written into a package.
    """
    while (handle := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(handle, True)
    os.close(handle)


def refuses(stream: TextIO) -> bool:
    """Whether the stream cannot be written. Its buffer forgets a large write that failed, so one
    more is tried.
    """
    try:
        print(file=stream, flush=True)
    except OSError:
        leave(stream)
        return True
    return False


def leave(stream: TextIO) -> None:
    """Python flushes stdout once more at exit; give it something that takes the bytes."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
