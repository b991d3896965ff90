"""Root reads every file; a block of code without that right."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

VERSION = 0x20080522
"""_LINUX_CAPABILITY_VERSION_3."""
READS_ALL = 1 << 1 | 1 << 2
"""CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH."""


@contextmanager
def unprivileged() -> Iterator[None]:
    """Modes of files hold for this thread and those that it starts, whoever runs the tests."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; the same for the high half

    def call(name: str) -> None:
        if libc[name](header, sets):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    call("capget")
    had = sets[0]
    sets[0] = had & ~READS_ALL
    call("capset")
    try:
        yield
    finally:
        sets[0] = had
        call("capset")
