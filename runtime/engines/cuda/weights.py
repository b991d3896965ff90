"""Weights from a package's files to the device, as fast as the disk gives them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

from thor_dflash.errors import PackageError
from thor_dflash.plugins.cuda.driver import Driver, Pinned
from thor_dflash.plugins.launch import Site
from thor_dflash.program import Weight
from thor_dflash.progress import Progress
from thor_dflash.tensors import Array

PIECE = 16 << 20
"""Read at a time, bytes."""

READERS = 4
"""Pieces read at once."""


class Filler(Protocol):
    """Puts the weights of a package into device memory."""

    def __call__(
        self,
        driver: Driver,
        weights: Mapping[str, Weight],
        at: Mapping[str, int],
        packed: Mapping[str, Site],
    ) -> None:
        """`weights` and their addresses by name; of packed matrices, a call that reads them. All of
        it is there when this returns.
        """
        ...


class Files:
    """Reads the weight files of a package."""

    def __init__(self, package: Path, progress: Progress) -> None:
        self._package = package
        self._progress = progress

    def __call__(
        self,
        driver: Driver,
        weights: Mapping[str, Weight],
        at: Mapping[str, int],
        packed: Mapping[str, Site],
    ) -> None:
        """See Filler.

        Raises:
            PackageError: a file is shorter than the programs say.
        """
        total = sum(weight.nbytes for weight in weights.values())
        free: SimpleQueue[Pinned] = SimpleQueue()
        for _ in range(READERS):
            free.put(driver.pinned(PIECE))

        def load(piece: tuple[Path, int, int, int]) -> int:
            path, offset, size, address = piece
            # Not when the thread begins: what goes wrong there, the pool says in its own words.
            driver.enter()
            pinned = free.get()
            try:
                _read(path, offset, pinned.bytes[:size])
                driver("cuMemcpyHtoD", address, pinned.address, size)
            finally:
                free.put(pinned)
            return size

        pieces = list(self._pieces(weights, at))
        with (
            self._progress.task("loading weights", total, "bytes") as task,
            ThreadPoolExecutor(READERS) as pool,
        ):
            for size in pool.map(load, pieces):
                task.advance(size)
        for _ in range(READERS):
            driver("cuMemFreeHost", free.get().address)

    def _pieces(
        self, weights: Mapping[str, Weight], at: Mapping[str, int]
    ) -> Iterator[tuple[Path, int, int, int]]:
        """In the order of the files: path, offset, bytes, device address."""
        for name, w in sorted(weights.items(), key=lambda item: (item[1].file, item[1].offset)):
            for start in range(0, w.nbytes, PIECE):
                size = min(PIECE, w.nbytes - start)
                yield self._package / w.file, w.offset + start, size, at[name] + start


def _read(path: Path, offset: int, into: Array) -> None:
    """Fill uint8 [n] from a file."""
    done = 0
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            while done < len(into) and (count := file.readinto(into[done:].data)):
                done += count
    except OSError as e:
        raise PackageError(f"{path} must be readable (got: {e.strerror})") from e
    if done < len(into):
        raise PackageError(f"{path} must hold {offset + len(into)} bytes (got {offset + done})")
