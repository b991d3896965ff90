"""Root reads every file; a block of code, or a call, without that right."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
VERSION = 0x20080522
"""_LINUX_CAPABILITY_VERSION_3."""
READS_ALL = 1 << 1 | 1 << 2
"""CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH."""


@contextmanager
def unprivileged() -> Iterator[None]:
    """Modes of files hold for this thread and those that it starts, whoever runs the tests."""
    sets = _sets()
    had = sets[0]
    sets[0] = had & ~READS_ALL
    _call("capset", sets)
    try:
        yield
    finally:
        sets[0] = had
        _call("capset", sets)


def asked_unprivileged(ask: Callable[[], T]) -> T:
    """What a call gives where modes of files hold for access(2), too, which goes by the rights that
    a thread may have and not by those that it has. They cannot be had again: the thread ends.
    """

    def without() -> T:
        sets = _sets()
        sets[0] &= ~READS_ALL
        sets[1] &= ~READS_ALL
        _call("capset", sets)
        return ask()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(without).result()


def _sets() -> ctypes.Array[ctypes.c_uint32]:
    """Effective, permitted, inheritable; the same for the high half."""
    sets = (ctypes.c_uint32 * 6)()
    _call("capget", sets)
    return sets


def _call(name: str, sets: ctypes.Array[ctypes.c_uint32]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(VERSION, 0)
    if libc[name](header, sets):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
