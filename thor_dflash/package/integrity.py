"""Compares the contents of a directory with the files that it should hold."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from errno import ELOOP
from pathlib import Path, PurePosixPath
from stat import S_ISREG

UNEXPECTED = "that no build wrote"
"""How the text of anything unexpected ends."""


@dataclass(frozen=True, slots=True)
class DirectoryProblems:
    """The problems found, as texts that begin with a path inside the directory."""

    closed: list[str] = field(default_factory=list[str])
    """Paths that could not be inspected, and why. Nothing is known of what is below them."""
    wrong: list[str] = field(default_factory=list[str])
    """Files that are missing or of another size, and anything unexpected."""


def inspect(root: Path, sizes: Mapping[str, int], besides: str) -> DirectoryProblems:
    """Check for the files in `sizes` (path -> bytes), and for any file, link or directory other
    than those and `besides`. Expected files are opened but not read.
    """
    found, behind, extra = DirectoryProblems(), set[str](), list[str]()
    folders = {str(parent) for name in sizes for parent in PurePosixPath(name).parents} | {"."}
    known = sizes.keys() | folders | {besides}
    for folder in sorted(folders):
        if _below(folder, behind):
            continue
        try:
            inside = _inside(root, folder)
        except OSError as e:
            behind.add(folder)
            found.closed.append(f"{folder}: {e.strerror}")
        else:
            extra += sorted(inside - known)
    for name, size in sizes.items():
        if not _below(name, behind):
            _look_at(root / name, name, size, found)
    found.wrong.extend(f"{name} {UNEXPECTED}" for name in extra)
    return found


def _below(name: str, folders: set[str]) -> bool:
    return not folders.isdisjoint(map(str, PurePosixPath(name).parents))


def _inside(root: Path, folder: str) -> set[str]:
    """All paths in a directory; empty if there is no such directory.

    Raises:
        OSError: it cannot be listed, or is a link.
    """
    # ONNX Runtime refuses to read files outside the package through a link.
    if (root / folder).is_symlink() and folder != ".":
        raise OSError(ELOOP, "a link")
    try:
        return {str(PurePosixPath(folder, name)) for name in os.listdir(root / folder)}
    except FileNotFoundError:
        return set()


def _look_at(path: Path, name: str, size: int, found: DirectoryProblems) -> None:
    try:
        stat = path.stat()
        regular = S_ISREG(stat.st_mode)
        if regular:  # opening a pipe would wait for its writer
            path.open("rb").close()
    except FileNotFoundError:
        if path.is_symlink():
            found.closed.append(f"{name}: a link to nothing")
        else:
            found.wrong.append(f"{name} missing")
    except OSError as e:
        found.closed.append(f"{name}: {e.strerror}")
    else:
        if not regular:
            found.wrong.append(f"{name} that is no file")
        elif stat.st_size != size:
            found.wrong.append(f"{name} of {stat.st_size} bytes, not {size}")
