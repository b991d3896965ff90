"""How long a process takes from its start until it can answer, and how fast its disk reads."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PIECE = 16 << 20
"""Bytes per read."""
READERS = 4
"""Pieces read at once, as an engine does."""
START = 19
"""Index of the start time, in ticks, among the fields of /proc/self/stat after the name. Source:
proc(5)."""


def since_start() -> float:
    """Seconds since this process began. Linux only."""
    # Bytes: the name may be in any encoding.
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    began = int(fields[START]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began


def forget(files: Sequence[Path]) -> None:
    """Ask the kernel to drop some files from the page cache, so that they are next read from disk.
    In-memory file systems ignore this.
    """
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_seconds(files: Sequence[Path], advance: Callable[[int], None]) -> float:
    """Read some files completely, reporting bytes to `advance`; return the seconds it took."""
    pieces = [
        (path, at) for path in files for at in range(0, path.stat().st_size, PIECE)
    ]  # in file order

    def read(piece: tuple[Path, int]) -> int:
        path, at = piece
        with path.open("rb", buffering=0) as file:
            file.seek(at)
            return len(file.read(PIECE))

    start = time.perf_counter()
    with ThreadPoolExecutor(READERS) as pool:
        for size in pool.map(read, pieces):
            advance(size)
    return time.perf_counter() - start
