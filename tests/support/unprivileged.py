"""Runs code without root's right to read every file, so that file modes hold for it."""

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
    """File modes hold in this thread and those that it starts, even if root runs the tests."""
    sets = _sets()
    had = sets[0]
    sets[0] = had & ~READS_ALL
    _call("capset", sets)
    try:
        yield
    finally:
        sets[0] = had
        _call("capset", sets)


def _sets() -> ctypes.Array[ctypes.c_uint32]:
    """Returns the thread's effective, permitted and inheritable capabilities: the low 32 bits of
    each, then the high ones.
    """
    sets = (ctypes.c_uint32 * 6)()
    _call("capget", sets)
    return sets


def _call(name: str, sets: ctypes.Array[ctypes.c_uint32]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(VERSION, 0)
    if libc[name](header, sets):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
