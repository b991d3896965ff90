"""What a directory holds, against the files that it should."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from stat import S_ISREG


@dataclass(frozen=True, slots=True)
class Contents:
    """What is amiss, in words that begin with a path inside the directory."""

    closed: list[str] = field(default_factory=list[str])
    """What could not be looked at, and why. Of what lies behind it nothing is known."""
    wrong: list[str] = field(default_factory=list[str])
    """Files that are not there, of another size, or too many."""


def look(root: Path, sizes: Mapping[str, int], besides: str) -> Contents:
    """Look for files, by path and size in bytes, and for others than these and `besides`. Each is
    opened; nothing is read.
    """
    found, behind = Contents(), set[str]()
    for folder in sorted({str(parent) for name in sizes for parent in PurePosixPath(name).parents}):
        if not _below(folder, behind) and (why := _closed(root, folder)):
            behind.add(folder)
            found.closed.append(f"{folder}: {why}")
    for name, size in sizes.items():
        if not _below(name, behind):
            _look_at(root / name, name, size, found)
    paths = (Path(folder, name) for folder, _, names in os.walk(root) for name in names)
    there = {path.relative_to(root).as_posix() for path in paths if os.path.exists(path)}
    extra = sorted(there - sizes.keys() - {besides})
    found.wrong.extend(f"{name} that no build wrote" for name in extra)
    return found


def _below(name: str, folders: set[str]) -> bool:
    return not folders.isdisjoint(map(str, PurePosixPath(name).parents))


def _closed(root: Path, folder: str) -> str:
    """Why a directory cannot be looked into; "" where it can, and where there is none."""
    path = root / folder
    # ONNX Runtime reads no file that a link leads out of the package to.
    if path.is_symlink() and folder != ".":
        return "a link"
    try:
        os.scandir(path).close()
    except FileNotFoundError:
        return ""
    except OSError as e:
        return e.strerror or str(e)
    return ""


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
