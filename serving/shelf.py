"""The prefixes that outlive the server: a directory of files, each whole or absent.

A file is named by the hash of its prefix's name, and holds what runtime/prefix_file.py says. What a
killed server left half-written has another ending, and is swept out when the next one begins.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from pathlib import Path

from thor_dflash.errors import ConfigError, PackageError, RequestError
from thor_dflash.runtime.prefix import Prefixes

ENDING = ".prefix"


class Shelf:
    """Used by one thread at a time; whether a name is in `files` may be asked by all."""

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
        self.files: dict[str, Path] = {}
        """By the name of the prefix."""

    def load(self, prefixes: Prefixes) -> list[str]:
        """Take every file in. What cannot be used is left where it is: a line for each."""
        problems: list[str] = []
        for path in sorted(self._directory.glob(f"*{ENDING}")):
            try:
                self.files[prefixes.load(path).name] = path
            except (PackageError, RequestError) as e:
                # With the file's own name: where it is on this machine is for its log.
                problems.append(str(e).replace(f"{self._directory}{os.sep}", ""))
        return problems

    def keep(self, prefixes: Prefixes, name: str) -> None:
        """Write one that is held, in place of the file there was.

        Raises:
            RequestError: it is no longer held, or cannot be written.
        """
        path = self._path(name)
        prefixes.save(name, path)
        self.files[name] = path

    def drop(self, name: str) -> None:
        """Remove one's file, if there is one.

        Raises:
            RequestError: it cannot be removed.
        """
        path = self._path(name)
        try:
            path.unlink(missing_ok=True)
        except OSError as e:
            raise RequestError(f"{path} must be removable (got: {e.strerror})") from e
        self.files.pop(name, None)

    def _path(self, name: str) -> Path:
        return self.files.get(name) or self.path_of(self._directory, name)

    @staticmethod
    def path_of(directory: Path, name: str) -> Path:
        """Where a prefix goes: its name may hold a slash, and be longer than a file's."""
        return directory / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}{ENDING}"

    def close(self) -> None:
        """Leave the directory to others. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1
