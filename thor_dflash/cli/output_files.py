"""Output files of the subcommands: checked before the work, and written atomically."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from thor_dflash.core.errors import RequestError
from thor_dflash.package.manifest import check_outside


def check(out: Path, ending: str, option: str) -> None:
    """Refuse a path that cannot or must not be written.

    Args:
        ending: Required file name extension, with the dot.
        option: The option that gave the path.

    Raises:
        PackageError: it is in a package.
        RequestError: it cannot be written, has another ending.
    """
    check_outside(option, out)
    if out.suffix != ending:
        raise RequestError(f"{option} must be a path ending in {ending} (got {out})")
    if out.is_dir() or not out.parent.is_dir():
        raise RequestError(f"{option} must be a file in a directory that exists (got {out})")
    with _beside(out) as partial:
        partial.touch()


@contextmanager
def whole(out: Path) -> Generator[IO[bytes]]:
    """A file to write, which is renamed to `out` once it is complete.

    Raises:
        RequestError: it cannot be written.
    """
    with _beside(out) as partial:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(out)


@contextmanager
def _beside(out: Path) -> Generator[Path]:
    """A temporary path next to `out`, removed afterwards."""
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        try:
            yield partial
        finally:
            partial.unlink(missing_ok=True)
    except OSError as e:
        raise RequestError(f"{out} must be writable (got: {e.strerror or e})") from e
