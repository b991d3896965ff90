"""A prefix on disk: one file, written atomically, for one package at one capacity.

    # thor-dflash prefix, sha256 of what follows: <64 hex digits>
    {"format": 3, "tool": ..., "package": ..., "device": ..., "capacity": ..., "chunk": ...,
     "prefix": {...}}, as one line
    <the arrays of the snapshot, in the order of their names>

Shapes and types are not in the file: they are taken from the model that reads it. A file of another
size, package, device, capacity or chunk is refused: another device may round otherwise.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from thor_dflash import __version__
from thor_dflash.core import message_text, strict_records
from thor_dflash.core.errors import PackageError, RequestError
from thor_dflash.core.tensors import Array, TensorSpec
from thor_dflash.package import manifest
from thor_dflash.runtime.decoding.model_runner import ModelRunner
from thor_dflash.runtime.decoding.sequence_state import Snapshot

FORMAT = 3
"""Version of the file format. A runtime reads only its own version."""
MAGIC = b"# thor-dflash prefix, sha256 of what follows: "
HEADER = 16 << 20
"""Maximum header size, bytes: a million tokens."""
AGAIN = "put the prefix again"


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """The fields of a file besides the arrays."""

    name: str
    tokens: tuple[int, ...]
    pinned: bool
    held: int
    """Tokens in the snapshot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    format: int
    tool: str
    package: str
    device: str
    capacity: int
    chunk: int
    prefix: StoredPrefix


def write_prefix(path: Path, model: ModelRunner, stored: StoredPrefix, snapshot: Snapshot) -> None:
    """Write a temporary file next to `path`, flush it, rename it.

    Raises:
        RequestError: the file cannot be written.
    """
    header = _Header(
        format=FORMAT,
        tool=__version__,
        package=manifest.sha256(model.manifest),
        device=model.engine.device,
        capacity=model.capacity,
        chunk=model.chunk,
        prefix=stored,
    )
    parts = [json.dumps(strict_records.encode(header)).encode() + b"\n"]
    parts += [snapshot.arrays[name].tobytes() for name in _names(model, stored.held)]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    try:
        _replace(path, [MAGIC + digest.hexdigest().encode() + b"\n", *parts])
    except OSError as e:
        raise RequestError(f"{path} must be a file that can be written (got: {e.strerror})") from e


def _replace(path: Path, parts: list[bytes]) -> None:
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_prefix(path: Path, model: ModelRunner, budget: int) -> tuple[StoredPrefix, Snapshot]:
    """Read what `write_prefix` wrote for this package and capacity.

    Raises:
        PackageError: unreadable, damaged, or of another package, version or capacity.
        RequestError: larger than the budget.
    """
    first, line, payload = _parts(path, budget)
    digest = hashlib.sha256(line)
    digest.update(payload)
    if first != MAGIC + digest.hexdigest().encode() + b"\n":
        raise PackageError(f"{path} must be as it was written (got an altered file); {AGAIN}")
    stored = _header(path, line, model).prefix
    arrays, at = dict[str, Array](), 0
    layout = model.state.layout(stored.held)
    if sum(spec.nbytes({}) for spec in layout.values()) != len(payload):
        raise PackageError(
            f"{path} must hold the state after {stored.held} tokens (got {len(payload)} bytes, "
            "which is another size)"
        )
    for name in _names(model, stored.held):
        arrays[name] = _array(layout[name], payload, at)
        at += layout[name].nbytes({})
    return stored, Snapshot(stored.held, 0, arrays)


def _parts(path: Path, budget: int) -> tuple[bytes, bytes, bytes]:
    try:
        # Not blocking: the opening of a pipe would wait for a writer.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            size = found.st_size
            if not stat.S_ISREG(found.st_mode):
                raise PackageError(f"{path} must be a file (got {stat.filemode(found.st_mode)})")
            if size > budget + HEADER:
                raise RequestError(
                    f"{path} must fit the memory for prefixes, {budget} bytes (got {size})"
                )
            first, line = file.readline(256), file.readline(HEADER)
            return first, line, file.read()
    except OSError as e:
        raise PackageError(f"{path} must be a readable file (got: {e.strerror})") from e


def _header(path: Path, line: bytes, model: ModelRunner) -> _Header:
    try:
        table = strict_records.as_table(json.loads(line)) or {}
    except ValueError as e:
        raise PackageError(f"{path} must have JSON as its second line (got: {e}); {AGAIN}") from e
    mine = {
        "format": FORMAT,
        "tool": __version__,
        "package": manifest.sha256(model.manifest),
        "device": model.engine.device,
        "capacity": model.capacity,
        "chunk": model.chunk,
    }
    for key, value in mine.items():
        if table.get(key) != value:
            got = message_text.show(table.get(key))
            raise PackageError(f"{path} must be written with {key} {value} (got {got}); {AGAIN}")
    return strict_records.decode(_Header, table, "", PackageError)


def _array(spec: TensorSpec, payload: bytes, at: int) -> Array:
    shape = spec.at({})
    count = int(np.prod(shape, dtype=np.int64))
    return np.frombuffer(payload, spec.dtype.numpy, count, at).reshape(shape)


def _names(model: ModelRunner, held: int) -> list[str]:
    return sorted(model.state.layout(held))
