"""Loads weights from a package's files to the device at the speed of the disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from thor_dflash.core.errors import PackageError
from thor_dflash.core.progress import Progress
from thor_dflash.core.tensors import Array
from thor_dflash.package.launch_program import Weight
from thor_dflash.plugins.cuda.driver import Driver, PinnedMemory
from thor_dflash.plugins.launch import CallSite

PIECE = 16 << 20
"""Bytes per read."""

READERS = 4
"""Pieces read at once."""


WeightFiller = Callable[
    [Driver, Mapping[str, Weight], Mapping[str, int], Mapping[str, CallSite]], None
]
"""Puts the weights of a package into device memory, and returns when all are there. Arguments: the
driver; the weights; the device address of each; for each packed matrix, a call that reads it."""


class FileWeights:
    """Reads the weight files of a package."""

    def __init__(self, package: Path, progress: Progress) -> None:
        self._package = package
        self._progress = progress

    def __call__(
        self,
        driver: Driver,
        weights: Mapping[str, Weight],
        at: Mapping[str, int],
        packed: Mapping[str, CallSite],
    ) -> None:
        """See WeightFiller.

        Raises:
            PackageError: a file cannot be read, or is shorter than the programs require.
        """
        total = sum(weight.nbytes for weight in weights.values())
        free: SimpleQueue[PinnedMemory] = SimpleQueue()
        for _ in range(READERS):
            free.put(driver.pinned(PIECE))

        def load(piece: tuple[Path, int, int, int]) -> int:
            path, offset, size, address = piece
            # Not in the pool's initializer: the pool would replace an error by its own.
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
            driver.free(free.get().address)

    def _pieces(
        self, weights: Mapping[str, Weight], at: Mapping[str, int]
    ) -> Iterator[tuple[Path, int, int, int]]:
        """Yield path, offset, bytes and device address of each piece, in file order."""
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
