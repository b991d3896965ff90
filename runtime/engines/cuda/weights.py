"""Weights from a package's files to the device, as fast as the disk gives them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

from thor_dflash.errors import PackageError
from thor_dflash.plugins.launch import Site
from thor_dflash.program import Weight
from thor_dflash.progress import Progress
from thor_dflash.runtime.engines.cuda.driver import Driver, Pinned

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

        def read(piece: tuple[Path, int, int, int]) -> tuple[Pinned, int, int]:
            path, offset, size, address = piece
            pinned = free.get()
            with path.open("rb", buffering=0) as file:
                file.seek(offset)
                view = pinned.bytes[:size].data
                done = 0
                while done < size and (count := file.readinto(view[done:])):
                    done += count
            if done < size:
                raise PackageError(f"{path} must hold {offset + size} bytes (got {offset + done})")
            return pinned, size, address

        pieces = list(self._pieces(weights, at))
        with (
            self._progress.task("loading weights", total, "bytes") as task,
            ThreadPoolExecutor(READERS) as pool,
        ):
            for pinned, size, address in pool.map(read, pieces):
                driver("cuMemcpyHtoD", address, pinned.address, size)
                free.put(pinned)
                task.advance(size)
        while not free.empty():
            driver("cuMemFreeHost", free.get().address)

    def _pieces(
        self, weights: Mapping[str, Weight], at: Mapping[str, int]
    ) -> Iterator[tuple[Path, int, int, int]]:
        """In the order of the files: path, offset, bytes, device address."""
        for name, w in sorted(weights.items(), key=lambda item: (item[1].file, item[1].offset)):
            for start in range(0, w.nbytes, PIECE):
                size = min(PIECE, w.nbytes - start)
                yield self._package / w.file, w.offset + start, size, at[name] + start
