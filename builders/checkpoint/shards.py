"""The safetensors files of a directory: every tensor by name, memory-mapped, none loaded.

The safetensors library reads and checks the headers. Its numpy interface supports neither BF16 nor
FP8, so tensors are views of the mapped files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from thor_dflash.builders.checkpoint.json_fields import Fields
from thor_dflash.core.errors import CheckpointError
from thor_dflash.core.tensors import Array
from thor_dflash.package.tokenizer_files import present

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

TYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Location, type and shape of one stored tensor."""

    file: Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    """Byte offset in the file."""
    end: int
    """Byte offset after the last byte."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.end - self.begin

    def __str__(self) -> str:
        return f"{self.dtype.name}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Shards:
    """The tensors of a directory. A file stays mapped as long as any of its arrays exists."""

    directory: Path
    stored: Mapping[str, TensorEntry]
    """Stored name -> location."""
    maps: Mapping[Path, NDArray[np.uint8]]
    """File -> its bytes, mapped read-only."""

    @classmethod
    def open(cls, directory: Path) -> Shards:
        """Read and check every header. Raises CheckpointError naming file and tensor."""
        index = directory / INDEX
        stored = _indexed(directory, index) if present(index) else _alone(directory)
        files = sorted({entry.file for entry in stored.values()})
        return cls(
            directory, stored, {f: np.memmap(f, np.uint8, "r").view(np.ndarray) for f in files}
        )

    def __contains__(self, name: str) -> bool:
        return name in self.stored

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def placed(self, name: str) -> str:
        """Name a tensor and its file, for messages about its values."""
        return f"{self.entry(name).file}: {name}"

    def entry(self, name: str) -> TensorEntry:
        """Return type, shape and location of a tensor."""
        if name not in self.stored:
            raise CheckpointError(f"{name} must be in the checkpoint (got nothing)")
        return self.stored[name]

    def array(self, name: str) -> Array:
        """Return the tensor as stored: a read-only view of the mapped file."""
        entry = self.entry(name)
        mapped = self.maps[entry.file][entry.begin : entry.end]
        return cast("Array", mapped.view(entry.dtype).reshape(entry.shape))


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Return every tensor of a file by name. Reads only the header.

    Layout: u64 little-endian length n, n bytes of JSON, then the tensors' bytes without gaps.
    """
    if not present(file):
        raise CheckpointError(f"{file} must be a file (got nothing there)")
    try:
        # safetensors types its reader as Any.
        opened: Any = safe_open(file, "np")
        with opened, file.open("rb") as stream:
            names: list[str] = opened.offset_keys()
            slices: list[Any] = [opened.get_slice(name) for name in names]
            found: list[tuple[str, tuple[int, ...]]] = [
                (part.get_dtype(), tuple(part.get_shape())) for part in slices
            ]
            at = 8 + int.from_bytes(stream.read(8), "little")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} must be a safetensors file (got: {error})") from error
    stored: dict[str, TensorEntry] = {}
    for name, (dtype, shape) in zip(names, found, strict=True):
        if dtype not in TYPES:
            raise CheckpointError(
                f"{file}: {name} must be of type {', '.join(TYPES)} (got {dtype})"
            )
        end = at + TYPES[dtype].itemsize * math.prod(shape)
        stored[name] = TensorEntry(file, TYPES[dtype], shape, at, end)
        at = end
    return stored


def read_metadata(file: Path) -> dict[str, str]:
    """Return the texts in a file's header. Raises CheckpointError."""
    read_header(file)
    opened: Any = safe_open(file, "np")
    with opened:
        return dict(opened.metadata() or {})


def _alone(directory: Path) -> dict[str, TensorEntry]:
    """Return the tensors of a directory without an index: those of its only safetensors file, or
    of `model.safetensors` and the files beside it, such as a prediction head.
    """
    files = sorted(directory.glob("*.safetensors"))
    if len(files) != 1 and directory / SINGLE not in files:
        raise CheckpointError(
            f"{directory} must hold one {SINGLE}, or several shards with {INDEX}"
            f" (got {len(files)} .safetensors files)"
        )
    return _merged(files)


def _indexed(directory: Path, index: Path) -> dict[str, TensorEntry]:
    """Return the tensors that an index names, each from the shard that the index gives."""
    places = _weight_map(index)
    if (directory / SINGLE).exists() and SINGLE not in places.values():
        raise CheckpointError(f"{directory} must hold either {SINGLE} or {INDEX} (got both)")
    stored = _merged([directory / file for file in sorted(set(places.values()))])
    found = {name: entry.file.name for name, entry in stored.items()}
    for name in sorted({*found, *places}):
        if found.get(name) != places.get(name):
            raise CheckpointError(
                f"{index}: {name} must be in {places.get(name, 'no shard')}"
                f" (got {found.get(name, 'nothing')})"
            )
    return stored


def _weight_map(index: Path) -> dict[str, str]:
    section = Fields.read(index).section("weight_map")
    for name in section.values:
        file = section.text(name)
        # A shard must be beside its index: a path could name any file on the machine.
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise section.wrong(name, "the name of a .safetensors file beside the index")
    return cast("dict[str, str]", dict(section.values))


def _merged(files: list[Path]) -> dict[str, TensorEntry]:
    stored: dict[str, TensorEntry] = {}
    for file in files:
        for name, entry in read_header(file).items():
            if name in stored:
                both = f"{stored[name].file.name} and {file.name}"
                raise CheckpointError(f"{file}: {name} must be in one shard (got {both})")
            stored[name] = entry
    return stored
