"""Reads the header of a safetensors file, with checks as strict as those of the format's library.

That library's numpy interface supports neither BF16 nor FP8, so the header is read here.
Layout: u64 little-endian length n, n bytes of JSON, then the tensors' bytes without gaps.
Source: github.com/huggingface/safetensors, README "Format".
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from thor_dflash.builders.checkpoint.json_fields import Fields, parse_object
from thor_dflash.core.errors import CheckpointError
from thor_dflash.package.tokenizer_files import present

LARGEST_HEADER = 100_000_000
"""The safetensors library's own limit, bytes."""

TYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
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

    def __str__(self) -> str:
        return f"{self.dtype.name}{list(self.shape)}"


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Return every tensor of the file by name. Reads only the header."""
    if not present(file):
        raise CheckpointError(f"{file} must be a file (got nothing there)")
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = _header_length(stream.read(8), size, file)
            text = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{file} must be readable (got {error.strerror})") from error
    entries = Fields(f"{file}: ", parse_object(text, f"{file}: the header"))
    stored = {
        name: _stored(entries.section(name), file, 8 + length)
        for name in entries.values
        if name != "__metadata__"
    }
    _check_tiling(stored, file, 8 + length, size)
    return stored


def _header_length(first: bytes, size: int, file: Path) -> int:
    if len(first) < 8:
        raise CheckpointError(f"{file} must be a safetensors file (got {size} bytes)")
    length = int(struct.unpack("<Q", first)[0])
    largest = min(LARGEST_HEADER, size - 8)
    if not 2 <= length <= largest:
        raise CheckpointError(
            f"{file}: the header must be 2 to {largest} bytes long (got {length});"
            " the file is truncated or not safetensors"
        )
    return length


def _stored(entry: Fields, file: Path, data: int) -> TensorEntry:
    """Parse the entry of one tensor. `data` is the file offset of the first tensor byte."""
    dtype = entry.text("dtype")
    if dtype not in TYPES:
        raise entry.wrong("dtype", f"one of {', '.join(TYPES)}")
    shape = entry.integers("shape")
    offsets = entry.integers("data_offsets")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise entry.wrong("data_offsets", "a begin and an end not before it")
    size = TYPES[dtype].itemsize
    for n in shape:
        size *= n
    if offsets[1] - offsets[0] != size:
        raise entry.wrong("data_offsets", f"{size} bytes apart, {dtype}{list(shape)}")
    return TensorEntry(file, TYPES[dtype], shape, data + offsets[0], data + offsets[1])


def _check_tiling(stored: dict[str, TensorEntry], file: Path, data: int, size: int) -> None:
    """Check that the tensors fill the file to its end without gaps or overlaps."""
    at = data
    for name, entry in sorted(stored.items(), key=_extent):
        if entry.end > size:
            raise CheckpointError(
                f"{file}: {name} must end within the file's {size} bytes (got {entry.end});"
                " the file is truncated"
            )
        if entry.begin != at:
            raise CheckpointError(
                f"{file}: {name} must start at byte {at}, behind the tensor before it"
                f" (got {entry.begin})"
            )
        at = entry.end
    if at != size:
        raise CheckpointError(f"{file} must be {at} bytes long (got {size})")


def _extent(item: tuple[str, TensorEntry]) -> tuple[int, int]:
    return item[1].begin, item[1].end
