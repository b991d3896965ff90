"""Storage of the prefixes that outlive the server: a directory of files, each complete or absent.

A file is named by the hash of its prefix's name; its format is that of
runtime/session/prefix_file.py. Files that a killed server left half-written have another suffix and
are removed when the next server starts.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from thor_dflash.core.errors import ConfigError, PackageError, RequestError
from thor_dflash.runtime.session.prefix_cache import Prefix, PrefixCache

ENDING = ".prefix"


class PrefixStore:
    """The directory. Only `has` may be called while another thread uses it."""

    def __init__(self, directory: Path) -> None:
        """Lock the directory for this server and remove half-written files.

        Raises:
            ConfigError: it cannot be used, or another server has locked it.
        """
        self._directory = directory
        self._lock = -1
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
            # The system releases the lock when the process ends, however it ends.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for path in directory.glob(f".*{ENDING}.*"):
                path.unlink()
            with tempfile.TemporaryFile(dir=directory) as probe:  # now, not at the first prefix
                probe.write(b"0")
        except BlockingIOError as e:
            self.close()
            raise ConfigError(
                f"serve.prefix_dir must be of one server alone (got {directory}, which another has)"
            ) from e
        except OSError as e:
            self.close()
            raise ConfigError(
                f"serve.prefix_dir must be a directory that can be written "
                f"(got {directory}: {e.strerror})"
            ) from e
        self._files: dict[str, _Files] = {}
        """The files on disk by the name of their prefix."""

    def has(self, prefix: Prefix) -> bool:
        """Whether the file of this name holds this very prefix, so that the next server will have
        it. May be called from any thread.
        """
        kept = self._files.get(prefix.name)
        return kept is not None and kept.tokens == prefix.tokens

    def load(self, prefixes: PrefixCache) -> list[str]:
        """Load every file. Unusable files stay in place; returns a line for each of them."""
        problems: list[str] = []
        # Files named by a hash, as this server writes them, come last: of several files of one
        # prefix the last one loaded is used.
        for path in sorted(self._directory.glob(f"*{ENDING}"), key=lambda p: (_is_own(p), p)):
            try:
                prefix = prefixes.load(path)
            except (PackageError, RequestError) as e:
                # Name the file without its directory: clients see these lines.
                problems.append(str(e).replace(f"{self._directory}{os.sep}", ""))
                continue
            others = self._paths(prefix.name)
            self._files[prefix.name] = _Files(prefix.tokens, (path, *others))
            if others:
                rule = f"must be the only file of its prefix (got {path.name}, which is used)"
                problems.append(f"{others[0].name} {rule}")
        # The name of a file may be no UTF-8, which no answer to a client can hold.
        return [line.encode(errors="backslashreplace").decode() for line in problems]

    def keep(self, prefixes: PrefixCache, name: str) -> None:
        """Write the file of a held prefix, replacing its old files. If that fails, an old file with
        another text is removed, which would otherwise be loaded at the next start.

        Raises:
            RequestError: the prefix is no longer held, or cannot be written.
        """
        path, before = self.path_of(self._directory, name), self._paths(name)
        try:
            tokens = prefixes.save(name, path).tokens
        except RequestError:
            if not any(self.has(prefix) for prefix in prefixes.list() if prefix.name == name):
                self.drop(name)
            raise
        others = tuple(other for other in before if other != path)
        self._files[name] = _Files(tokens, (path, *others))
        for other in others:
            _remove(other)
        self._files[name] = _Files(tokens, (path,))

    def drop(self, name: str) -> bool:
        """Remove the files of a prefix. Returns whether there was any.

        Raises:
            RequestError: one cannot be removed.
        """
        # Include the regular path: a file there that could not be loaded is not in `_files`.
        paths = {self.path_of(self._directory, name), *self._paths(name)}
        removed = [_remove(path) for path in paths]
        self._files.pop(name, None)
        return any(removed)

    def _paths(self, name: str) -> tuple[Path, ...]:
        kept = self._files.get(name)
        return kept.paths if kept else ()

    @staticmethod
    def path_of(directory: Path, name: str) -> Path:
        """Return the path of a prefix's file. Hashed, because the name of a prefix may contain a
        slash and may be longer than a file name.
        """
        return directory / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}{ENDING}"

    def close(self) -> None:
        """Unlock the directory. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1


@dataclass(frozen=True, slots=True)
class _Files:
    """The files of one prefix."""

    tokens: tuple[int, ...]
    paths: tuple[Path, ...]
    """First the file that holds `tokens`, then other files of the same prefix, copies say."""


def _is_own(path: Path) -> bool:
    return re.fullmatch("[0-9a-f]{32}", path.stem) is not None


def _remove(path: Path) -> bool:
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError as e:
        raise RequestError(f"{path} must be removable (got: {e.strerror})") from e
    return True
