"""What the machine, or a limit of the shell, has no more of: how Python and libraries report it."""

from __future__ import annotations

import errno
import resource

from thor_dflash.core.errors import ConfigError

_FILES, _MEMORY = (errno.EMFILE, errno.ENFILE), (errno.ENOMEM,)
_UNMAPPED = ("failed to map segment", "cannot allocate memory")
"""How the dynamic loader reports that a library does not fit the memory, in an ImportError."""


MEMORY = 512 << 20
"""Least limit of memory, bytes. Below it, numpy prints tracebacks of its own while it is imported,
or its OpenBLAS ends the process."""


def check_memory() -> None:
    """Refuse a limit of the shell under which numpy cannot be imported.

    Raises:
        ConfigError: the limit is too low.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < MEMORY:
        raise ConfigError(
            f"the limit of memory must be >= {MEMORY} bytes (got {limit}); ulimit -v unlimited"
        )


def shortage(error: BaseException) -> str:
    """The message for an exception that reports a shortage; "" for any other exception."""
    text, number = str(error), getattr(error, "errno", None)
    if isinstance(error, RuntimeError) and "can't start new thread" in text:
        what, limit = "threads", "ulimit -u and ulimit -v limit them"
    elif number in _FILES:
        what, limit = "open files", "ulimit -n limits them"
    elif (
        isinstance(error, MemoryError)
        or number in _MEMORY
        or (isinstance(error, ImportError) and any(part in text for part in _UNMAPPED))
    ):
        what, limit = "memory", "ulimit -v limits it"
    else:
        return ""
    return f"the system must have {what} for this (got: {text or 'none left'}); {limit}"
