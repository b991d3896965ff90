"""Writes a package so that a half-written one is never mistaken for a complete one.

Files are written to a hidden directory beside the package, hashed and flushed one by one; one
rename then makes the directory the package. A journal in it lets a build that was killed resume
where it stopped, if the same build (`key`) is run again. Files of the killed build are hashed once
more: a machine that lost power may have lost their contents, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Self

from thor_dflash.core.errors import PackageError
from thor_dflash.core.progress import Progress, Silent, print_line
from thor_dflash.package.manifest import NAME, FileEntry, check_outside, hash_file, is_package

JOURNAL = ".journal"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_EXCHANGE = 2
"""RENAME_EXCHANGE of renameat2(2)."""
_AT_CWD = -100


class AtomicPackage:
    """A package being written. Use as a context manager; without `finish` everything is deleted.

    `out` must not be inside another package. It must be free, or hold an earlier package, which
    stays in place until `finish`. A lock on the directory keeps a second build away; the system
    releases it when the process ends, however it ends.

    Raises:
        PackageError: `out` is something else, or another build is writing it, or the disk is full.
    """

    def __init__(self, out: Path, key: str, progress: Progress | None = None) -> None:
        self._progress = progress or Silent()
        self.out = Path(os.path.realpath(out))  # resolve() fails on circular links
        self._key = key
        self._partial = self.out.with_name(f".{self.out.name}.partial")
        self._files: dict[str, FileEntry] = {}
        self._lock = -1
        self._made: list[Path] = []
        """Parent directories that were missing, innermost first."""

    @property
    def files(self) -> dict[str, FileEntry]:
        """The files written so far, by name."""
        return dict(self._files)

    def __enter__(self) -> Self:
        check_out(self.out)
        try:
            self._made = _make_parents(self.out.parent)
            self._lock = _lock(self._partial, self.out)
            _recover(self.out)
            self._resume()
        except BaseException as e:
            self._discard()
            if isinstance(e, OSError):
                where = e.filename or self.out
                raise PackageError(f"{where} must be writable (got: {e.strerror})") from e
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._lock < 0:
            return
        self._discard()
        if isinstance(error, OSError) and error.errno in _FULL:
            raise PackageError(
                f"the disk must have space for {self.out} (got: no space left on device)"
            ) from error

    def write(self, name: str, writer: Callable[[Path], None]) -> FileEntry:
        """Let `writer` write one file at the path passed to it, then hash and flush the file.

        The writer is skipped if an earlier build with the same key has written this file.
        """
        if name in self._files:
            return self._files[name]
        path = self._partial / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # part of a file of a killed build
        writer(path)
        entry = hash_file(path)
        _flush(path)
        _flush(path.parent)
        self._note({"name": name, "sha256": entry.sha256, "bytes": entry.bytes})
        self._files[name] = entry
        return entry

    def finish(self, manifest: str) -> None:
        """Write the manifest and turn the directory into the package by one rename."""
        path = self._partial / NAME
        path.write_text(manifest, encoding="utf-8")
        _flush(path)
        self._drop_strays()
        _flush(self._partial)
        _install(self._partial, self.out)
        _flush(self.out.parent)
        os.close(self._lock)
        self._lock = -1

    def _resume(self) -> None:
        journal = self._partial / JOURNAL
        rows = _rows(journal)
        if not rows or rows[0].get("key") != self._key:
            _empty(self._partial)
            self._note({"key": self._key})
            return
        staged = {r["name"]: FileEntry(sha256=r["sha256"], bytes=r["bytes"]) for r in rows[1:]}
        total = sum(entry.bytes for entry in staged.values())
        with self._progress.task("checking the stopped build", total, "bytes") as task:
            for name, entry in staged.items():
                path = self._partial / name
                whole = path.is_file() and path.stat().st_size == entry.bytes
                if whole and hash_file(path, task.advance) == entry:
                    self._files[name] = entry

    def _note(self, row: dict[str, object]) -> None:
        with (self._partial / JOURNAL).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _drop_strays(self) -> None:
        # Strays: the journal, temporary files of writers, and files of a killed build that this
        # one lacks.
        ours = {self._partial / name for name in (*self._files, NAME)}
        ours |= {parent for path in ours for parent in path.parents}
        for path in sorted(self._partial.rglob("*"), reverse=True):  # directories after their files
            if path in ours:
                continue
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            else:
                path.unlink()

    def _discard(self) -> None:
        if self._lock >= 0:
            _remove(self._partial)
            os.close(self._lock)
            self._lock = -1
        _remove_empty(self._made)


@contextlib.contextmanager
def parents(path: Path) -> Generator[None]:
    """Make the missing directories above `path`, and remove those again after an exception."""
    made = _make_parents(path.parent)
    try:
        yield
    except BaseException:
        _remove_empty(made)
        raise


def check_out(out: Path) -> None:
    """Refuse a path inside another package, and one that holds anything but an earlier package.

    Raises:
        PackageError: it is inside a package, or holds something else.
    """
    check_outside("--out", out)
    if (out.exists() or out.is_symlink()) and not is_package(out):
        what = "a directory of something else" if out.is_dir() else "a file"
        raise PackageError(f"{out} must be free or a thor-dflash package (got {what})")


def _make_parents(parent: Path) -> list[Path]:
    """Make a directory; return it and those above it that were missing, innermost first."""
    missing = [p for p in (parent, *parent.parents) if not p.exists()]
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except BaseException:
        _remove_empty(missing)
        raise
    return missing


def _remove_empty(directories: list[Path]) -> None:
    for directory in directories:
        with contextlib.suppress(OSError):  # another process may have put something there
            directory.rmdir()


def _lock(partial: Path, out: Path) -> int:
    """Create the directory and lock it. Returns the descriptor, which holds the lock."""
    while True:
        partial.mkdir(exist_ok=True)
        handle = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            os.close(handle)
            raise PackageError(f"{out} must have one build at a time (got a second)") from e
        # Between `open` and `flock`, another build may have renamed the directory.
        if partial.exists() and os.path.samestat(os.fstat(handle), partial.stat()):
            if _ours(partial):
                return handle
            os.close(handle)
            raise PackageError(
                f"{partial} must be free or a build that was stopped (got something else)"
            )
        os.close(handle)


def _ours(partial: Path) -> bool:
    """Whether a build made this directory: it is empty, has a journal, or is a replaced package."""
    return not any(partial.iterdir()) or (partial / JOURNAL).is_file() or is_package(partial)


def _rows(journal: Path) -> list[dict[str, Any]]:
    """Return the rows of a journal, up to a line that a crash cut short."""
    rows: list[dict[str, Any]] = []
    with contextlib.suppress(OSError, ValueError):
        for line in journal.read_text(encoding="utf-8").splitlines():
            rows.append(json.loads(line))
    return rows


def _empty(directory: Path) -> None:
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            _clear(path)
        else:
            path.unlink()


def _clear(directory: Path) -> None:
    if not _remove(directory):
        raise PackageError(f"{directory} must be removable (got a directory that is not)")


def _remove(directory: Path) -> bool:
    """Delete a directory as far as possible; return whether it is gone."""
    shutil.rmtree(directory, ignore_errors=True)
    return not os.path.lexists(directory)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _install(partial: Path, out: Path) -> None:
    if not out.exists():
        partial.rename(out)
        return
    check_out(out)
    # After the swap the old package has the name of the partial directory. It is locked, so that a
    # build that starts now does not use it while it is being deleted.
    handle = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _exchange(partial, out):
            _discard_old(partial)
            return
    finally:
        os.close(handle)
    # The file system cannot swap two names: for a moment there is no package at `out`.
    old = _old(out)
    try:
        out.rename(old)
        partial.rename(out)
    except BaseException:
        if old.exists() and not out.exists():
            old.rename(out)
        raise
    _discard_old(old)


def _discard_old(directory: Path) -> None:
    """Delete the replaced package; the new one is complete whether or not this succeeds."""
    if not _remove(directory):
        print_line(sys.stderr, f"note: {directory}, the replaced package, cannot be deleted")


def _old(out: Path) -> Path:
    return out.with_name(f".{out.name}.old")


def _recover(out: Path) -> None:
    """Clean up after a build that was killed between or after the two renames of `_install`.

    Raises:
        PackageError: what is left of an old package cannot be deleted.
    """
    old = _old(out)
    if is_package(old) and not out.exists():
        old.rename(out)
    elif is_package(old):
        _clear(old)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two names atomically. Returns False if the system cannot."""
    try:
        swap = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    return bool(swap(_AT_CWD, os.fsencode(a), _AT_CWD, os.fsencode(b), _EXCHANGE) == 0)
