"""Files that verbs write: refused before the work that would be lost, and whole or not there."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from thor_dflash.errors import RequestError


def check(out: Path, ending: str, package: Path, option: str) -> None:
    """Refuse a path that could not be written.

    Args:
        ending: Of its name, with the dot.
        package: Nothing is written in there.
        option: Who named the path.
    """
    # Not Path.resolve, which fails where links go round.
    if Path(os.path.realpath(package)) in Path(os.path.realpath(out)).parents:
        raise RequestError(f"{option} must be outside the package (got {out})")
    if out.suffix != ending:
        raise RequestError(f"{option} must be a path ending in {ending} (got {out})")
    if out.is_dir() or not out.parent.is_dir():
        raise RequestError(f"{option} must be a file in a directory that exists (got {out})")
    with _beside(out) as partial:
        partial.touch()


def write(out: Path, fill: Callable[[IO[bytes]], object]) -> None:
    """Write what `fill` puts into a file to `out` in one rename: whole, or not at all."""
    with _beside(out) as partial:
        with partial.open("wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(out)


@contextmanager
def _beside(out: Path) -> Generator[Path]:
    """Where `out` is written before it has its name; gone afterwards."""
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        try:
            yield partial
        finally:
            partial.unlink(missing_ok=True)
    except OSError as e:
        raise RequestError(f"{out} must be writable (got: {e.strerror or e})") from e
