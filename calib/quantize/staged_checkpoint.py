"""Writes a checkpoint directory part by part, so that a run that is killed can continue.

The headers of all shards are known before the first weight, so every byte has its place from the
beginning. Files are in a hidden directory beside the final one, which gets its name by one rename
at the end. A journal there has a line for each finished unit of work, with the hashes of what it
wrote: a machine that lost power may have lost their contents, so they are hashed again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from thor_dflash.builders.checkpoint.shards import TYPES
from thor_dflash.calib.quantize.tensors import OutputTensor
from thor_dflash.core.errors import CheckpointError, ConfigError
from thor_dflash.core.progress import Progress
from thor_dflash.package.manifest import check_outside

JOURNAL = "quantize.jsonl"
PIECE = 1 << 24
"""Bytes hashed at a time."""
HASHING = 8
"""Threads that hash."""
RESERVE = 64 << 20
"""Bytes of disk beside the shards, for the small files and the file system."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One safetensors file to write."""

    name: str
    header: bytes
    """Length, JSON and padding."""
    begins: Mapping[str, int]
    """Tensor -> byte offset in the file."""
    size: int


PYTORCH: Mapping[str, str] = {"format": "pt"}
"""Metadata that transformers wants in a checkpoint."""


def shard_file(
    name: str, tensors: Sequence[OutputTensor], metadata: Mapping[str, str] = PYTORCH
) -> ShardFile:
    """Lay out a file. Larger element types come first, so that every tensor is aligned."""
    ordered = sorted(tensors, key=lambda t: (-TYPES[t.dtype].itemsize, t.name))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    at, offsets = 0, dict[str, int]()
    for tensor in ordered:
        end = at + tensor.nbytes
        shape = list(tensor.shape)
        header[tensor.name] = {"dtype": tensor.dtype, "shape": shape, "data_offsets": [at, end]}
        offsets[tensor.name], at = at, end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    whole = len(text).to_bytes(8, "little") + text
    return ShardFile(name, whole, {k: len(whole) + v for k, v in offsets.items()}, len(whole) + at)


class StagedCheckpoint:
    """A checkpoint being written. Use as a context manager.

    After an error of the checkpoint that is read, nothing stays; after any other one, as after
    Ctrl-C or a kill, the same command continues. A lock keeps a second run away.
    """

    def __init__(self, out: Path, shards: Sequence[ShardFile], key: str) -> None:
        self.out = Path(os.path.realpath(out))
        self.partial = self.out.with_name(f".{self.out.name}.partial")
        self._shards = shards
        self._key = key
        self._lock = -1
        self._files: dict[str, int] = {}
        self._places = {
            tensor: (shard.name, begin)
            for shard in shards
            for tensor, begin in shard.begins.items()
        }
        self._rows: list[Row] = []
        self._dropped = False

    def __enter__(self) -> Self:
        try:
            self._open()
        except OSError as e:
            self.close()
            where = e.filename or self.out
            raise ConfigError(f"--out {where} must be writable (got: {e.strerror})") from e
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if isinstance(error, CheckpointError):
            shutil.rmtree(self.partial, ignore_errors=True)
        self.close()
        if isinstance(error, KeyboardInterrupt) and self.partial.exists():
            kept = f"the same command continues with {self.partial}"
            raise KeyboardInterrupt(kept) from error

    def close(self) -> None:
        """Close all files and release the lock."""
        for handle in (*self._files.values(), *([self._lock] if self._lock >= 0 else [])):
            os.close(handle)
        self._files, self._lock = {}, -1

    def leave_lock(self) -> None:
        """In a forked process: leave the lock to the first one alone, so that a run can continue as
        soon as that is gone.
        """
        os.close(self._lock)
        self._lock = -1

    @property
    def continues(self) -> bool:
        """Whether an earlier run has finished units of the same work."""
        return len(self._rows) > 0

    def _open(self) -> None:
        self.partial.mkdir(exist_ok=True)
        self._lock = os.open(self.partial, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise ConfigError(f"--out {self.out} must have one run at a time (got a second)") from e
        rows = _read_rows(self.partial / JOURNAL)
        if any(self.partial.iterdir()) and not (self.partial / JOURNAL).is_file():
            raise ConfigError(
                f"{self.partial} must be free or a run that was stopped (got something else)"
            )
        if rows and rows[0].get("key") == self._key:
            self._rows = rows[1:]
        else:
            self._dropped = len(rows) > 1
            for path in self.partial.iterdir():
                path.unlink()
            self.note({"key": self._key})
        self._check_disk()
        for shard in self._shards:
            handle = os.open(self.partial / shard.name, os.O_RDWR | os.O_CREAT, 0o644)
            self._files[shard.name] = handle
            os.posix_fallocate(handle, 0, shard.size)
            os.ftruncate(handle, shard.size)
            os.pwrite(handle, shard.header, 0)

    def _check_disk(self) -> None:
        """Refuse a disk without space for all shards, less what is there already."""
        staged = sum(
            (self.partial / shard.name).stat().st_blocks * 512
            for shard in self._shards
            if (self.partial / shard.name).exists()
        )
        need = sum(shard.size for shard in self._shards) + RESERVE
        free = shutil.disk_usage(self.partial).free + staged
        if free < need:
            if not self.continues:
                shutil.rmtree(self.partial, ignore_errors=True)
            raise ConfigError(f"the disk of --out must have {need} bytes free (got {free})")

    def finished(self, progress: Progress) -> dict[str, Row]:
        """Return the journal's lines of finished units whose bytes are still as they were."""
        total = sum(self._size(row) for row in self._rows)
        found: dict[str, Row] = {}
        self._say_dropped(progress)
        if not self._rows:
            return found
        with (
            progress.task("checking the stopped run", total, "bytes") as task,
            ThreadPoolExecutor(HASHING) as pool,
        ):
            for row, intact in zip(self._rows, pool.map(self._intact, self._rows), strict=True):
                if intact:
                    found[row["unit"]] = row
                task.advance(self._size(row))
        return found

    def latest(self, progress: Progress) -> list[Row]:
        """Return the journal's lines up to the last one whose bytes are still as they were: for a
        run whose units overwrite what earlier ones wrote.
        """
        self._say_dropped(progress)
        rows = list(self._rows)
        if rows:
            with progress.task("checking the stopped run"):
                while rows and not self._intact(rows[-1]):
                    rows.pop()
        return rows

    def _say_dropped(self, progress: Progress) -> None:
        if self._dropped:
            with progress.task("beginning anew: the stopped run had other settings or sources"):
                pass

    def _intact(self, row: Row) -> bool:
        return all(self._hash(t, n) == digest for t, (n, digest) in row["tensors"].items())

    @staticmethod
    def _size(row: Row) -> int:
        return sum(size for size, _ in row["tensors"].values())

    def _hash(self, tensor: str, size: int) -> str:
        file, begin = self._places[tensor]
        digest = hashlib.sha256()
        for at in range(0, size, PIECE):
            digest.update(os.pread(self._files[file], min(PIECE, size - at), begin + at))
        return digest.hexdigest()

    def write(self, tensor: str, at: int, data: bytes) -> None:
        """Write a part of a tensor, from its byte `at` on."""
        file, begin = self._places[tensor]
        view = memoryview(data)
        while view:
            done = os.pwrite(self._files[file], view, begin + at)
            at, view = at + done, view[done:]

    def read(self, tensor: str, at: int, size: int) -> bytes:
        """Return `size` bytes of what was written, from byte `at` of the tensor on."""
        file, begin = self._places[tensor]
        return os.pread(self._files[file], size, begin + at)

    def finish_unit(self, row: Row) -> None:
        """Flush what a unit wrote, then note it: {"unit", "tensors": {name: [bytes, sha256]}}."""
        self.flush(row)
        self.note(row)

    def flush(self, row: Row) -> None:
        """Have the disk hold what a unit wrote."""
        for file in {self._places[tensor][0] for tensor in row["tensors"]}:
            os.fsync(self._files[file])

    def finish(self, files: Mapping[str, bytes]) -> None:
        """Write the small files and turn the directory into the checkpoint by one rename."""
        for name, data in files.items():
            self._write_file(name, data)
        for handle in self._files.values():
            os.fsync(handle)
        (self.partial / JOURNAL).unlink()
        os.fsync(self._lock)
        self.partial.rename(self.out)
        self._sync_parent()

    def finish_file(self, data: bytes) -> None:
        """Leave one file at `out` in place of a directory; what was staged goes."""
        self._write_file(self.out.name, data)
        (self.partial / self.out.name).replace(self.out)
        self._sync_parent()
        shutil.rmtree(self.partial)

    def _write_file(self, name: str, data: bytes) -> None:
        with (self.partial / name).open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def _sync_parent(self) -> None:
        parent = os.open(self.out.parent, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(parent)
        os.close(parent)

    def note(self, row: Row) -> None:
        """Add a line to the journal."""
        with (self.partial / JOURNAL).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())


def check_out(out: Path, source: Path | None = None) -> None:
    """Refuse a directory that exists, one whose parent does not, and one inside the source.

    Raises: ConfigError.
    """
    real = Path(os.path.realpath(out))
    check_outside("--out", out)
    if source is not None and Path(os.path.realpath(source)) in (real, *real.parents):
        raise ConfigError(f"--out must be outside the checkpoint that is read (got {out})")
    if os.path.lexists(out):
        raise ConfigError(f"--out must be a new directory (got {out}, which exists)")
    if not real.parent.is_dir():
        raise ConfigError(f"--out must be in a directory that exists (got {out})")


def _read_rows(journal: Path) -> list[Row]:
    """Return the lines of a journal, after removing one that a crash cut short."""
    rows: list[Row] = []
    if not journal.is_file():
        return rows
    data, whole = journal.read_bytes(), 0
    with suppress(ValueError):
        while (end := data.find(b"\n", whole)) >= 0:
            rows.append(json.loads(data[whole:end]))
            whole = end + 1
    os.truncate(journal, whole)
    return rows
