"""What a directory holds, against the files that it should."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from errno import ELOOP
from pathlib import Path, PurePosixPath
from stat import S_ISREG


@dataclass(frozen=True, slots=True)
class Contents:
    """What is amiss, in words that begin with a path inside the directory."""

    closed: list[str] = field(default_factory=list[str])
    """What could not be looked at, and why. Of what lies behind it nothing is known."""
    wrong: list[str] = field(default_factory=list[str])
    """Files that are not there or of another size; anything that is too many."""


def look(root: Path, sizes: Mapping[str, int], besides: str) -> Contents:
    """Look for files, by path and size in bytes, and for anything beside them and `besides`: files,
    links and directories of whatever kind. Each is opened; nothing is read.
    """
    found, behind, extra = Contents(), set[str](), list[str]()
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
    found.wrong.extend(f"{name} that no build wrote" for name in extra)
    return found


def _below(name: str, folders: set[str]) -> bool:
    return not folders.isdisjoint(map(str, PurePosixPath(name).parents))


def _inside(root: Path, folder: str) -> set[str]:
    """Paths in a directory of whatever kind; none where there is no such directory.

    Raises:
        OSError: it cannot be looked into.
    """
    # ONNX Runtime reads no file that a link leads out of the package to.
    if (root / folder).is_symlink() and folder != ".":
        raise OSError(ELOOP, "a link")
    try:
        return {str(PurePosixPath(folder, name)) for name in os.listdir(root / folder)}
    except FileNotFoundError:
        return set()


def _look_at(path: Path, name: str, size: int, found: Contents) -> None:
    try:
        stat = path.stat()
        regular = S_ISREG(stat.st_mode)
        if regular:  # to open a pipe is to wait for who writes it
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
