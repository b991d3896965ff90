"""The prefixes that outlive the server: a directory of files, each whole or absent.

A file is named by the hash of its prefix's name, and holds what runtime/prefix_file.py says. What a
killed server left half-written has another ending, and is swept out when the next one begins.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from thor_dflash.errors import ConfigError, PackageError, RequestError
from thor_dflash.runtime.prefix import Prefix, Prefixes

ENDING = ".prefix"


class Shelf:
    """Used by one thread at a time, but for `has`."""

    def __init__(self, directory: Path) -> None:
        """Take the directory for this server alone, and sweep out what is half-written.

        Raises:
            ConfigError: it cannot be used, or another server has it.
        """
        self._directory = directory
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
            # Let go by the system when the process ends, however it ends.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for path in directory.glob(f".*{ENDING}.*"):
                path.unlink()
        except BlockingIOError as e:
            os.close(self._lock)
            raise ConfigError(
                f"serve.prefix_dir must be of one server alone (got {directory}, which another has)"
            ) from e
        except OSError as e:
            raise ConfigError(
                f"serve.prefix_dir must be a directory that can be written "
                f"(got {directory}: {e.strerror})"
            ) from e
        self._files: dict[str, _Files] = {}
        """By the name of the prefix."""

    def has(self, prefix: Prefix) -> bool:
        """Whether what is held under a name is what the next server will have. From any thread."""
        kept = self._files.get(prefix.name)
        return kept is not None and kept.tokens == prefix.tokens

    def load(self, prefixes: Prefixes) -> list[str]:
        """Take every file in. What cannot be used is left where it is: a line for each."""
        problems: list[str] = []
        # Those that have their own name last: of copies of a prefix the last one counts.
        for path in sorted(self._directory.glob(f"*{ENDING}"), key=lambda p: (_is_own(p), p)):
            try:
                prefix = prefixes.load(path)
            except (PackageError, RequestError) as e:
                # With the file's own name: where it is on this machine is for its log.
                problems.append(str(e).replace(f"{self._directory}{os.sep}", ""))
                continue
            others = self._paths(prefix.name)
            self._files[prefix.name] = _Files(prefix.tokens, (path, *others))
            if others:
                rule = f"must be the only file of its prefix (got {path.name}, which is used)"
                problems.append(f"{others[0].name} {rule}")
        return problems

    def keep(self, prefixes: Prefixes, name: str) -> None:
        """Write one that is held, in place of the files there were. Where it cannot be written, one
        of another text is removed: it would be there again after a restart.

        Raises:
            RequestError: it is no longer held, or cannot be written.
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
        """Remove the files of one; whether there was any.

        Raises:
            RequestError: one cannot be removed.
        """
        # Its own, too, which is not among them where it was left out.
        paths = {self.path_of(self._directory, name), *self._paths(name)}
        removed = [_remove(path) for path in paths]
        self._files.pop(name, None)
        return any(removed)

    def _paths(self, name: str) -> tuple[Path, ...]:
        kept = self._files.get(name)
        return kept.paths if kept else ()

    @staticmethod
    def path_of(directory: Path, name: str) -> Path:
        """Where a prefix goes: its name may hold a slash, and be longer than a file's."""
        return directory / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}{ENDING}"

    def close(self) -> None:
        """Leave the directory to others. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1


@dataclass(frozen=True, slots=True)
class _Files:
    """What is on disk of one prefix."""

    tokens: tuple[int, ...]
    paths: tuple[Path, ...]
    """The one that holds them first, then copies that somebody made."""


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
