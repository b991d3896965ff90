"""Reads the rows of a stored linear as float32, a few at a time.

Bytes are read, not mapped: pages of a mapped file count as the process's memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from thor_dflash.builders.checkpoint.linear_weights import Linear, load
from thor_dflash.builders.checkpoint.quantized_matrix import WeightFormat, finite
from thor_dflash.builders.checkpoint.shards import Shards
from thor_dflash.core.errors import CheckpointError
from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins.numpy_math import E2M1, NVFP4_GROUP

Floats = NDArray[np.float32]

READ_AHEAD = 1 << 17
"""Bytes that Linux reads ahead for one request."""
CHUNK = 1 << 17
"""Weights of a chunk: small enough for the caches of a core."""


class TensorReader(Protocol):
    """Gives the bytes of a checkpoint's tensors, to several threads."""

    @property
    def shards(self) -> Shards:
        """Names, types and shapes of the tensors."""
        ...

    def read(self, name: str, begin: int, size: int) -> bytes:
        """Return `size` bytes of a stored tensor from its byte `begin` on."""
        ...

    def rows(self, name: str, first: int, last: int) -> Array:
        """Return the rows `first` to `last` (excluded) of a stored tensor."""
        ...

    def prefetch(self, names: Sequence[str]) -> None:
        """Have the system read stored tensors into its page cache."""
        ...


class ShardReader:
    """The open files of a checkpoint. Safe for several threads."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._files: dict[Path, int] = {}

    @property
    def shards(self) -> Shards:
        """See TensorReader."""
        return self._shards

    def __enter__(self) -> Self:
        for file in self.shards.maps:
            self._files[file] = os.open(file, os.O_RDONLY)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for handle in self._files.values():
            os.close(handle)

    def read(self, name: str, begin: int, size: int) -> bytes:
        """Return `size` bytes of a stored tensor from its byte `begin` on."""
        entry = self.shards.entry(name)
        data = os.pread(self._files[entry.file], size, entry.begin + begin)
        if len(data) != size:
            raise CheckpointError(
                f"{entry.file} must stay as it is while it is read (got fewer bytes)"
            )
        return data

    def rows(self, name: str, first: int, last: int) -> Array:
        """Return the rows `first` to `last` (excluded) of a stored tensor."""
        entry = self.shards.entry(name)
        row = prod(entry.shape[1:]) * entry.dtype.itemsize
        data = self.read(name, first * row, (last - first) * row)
        return np.frombuffer(data, entry.dtype).reshape(-1, *entry.shape[1:])

    def prefetch(self, names: Sequence[str]) -> None:
        """Have the system read stored tensors into its page cache."""
        for entry in map(self.shards.entry, names):
            handle = self._files[entry.file]
            for at in range(entry.begin, entry.end, READ_AHEAD):
                os.posix_fadvise(handle, at, READ_AHEAD, os.POSIX_FADV_WILLNEED)


@dataclass(frozen=True, slots=True)
class LinearRows:
    """The rows of one linear."""

    reader: TensorReader
    linear: Linear
    shape: tuple[int, int]
    """[N, K]."""
    scale: Floats | None
    """Of a quantised linear: float32 [N]."""

    @classmethod
    def of(cls, reader: TensorReader, linear: Linear) -> LinearRows:
        """Find a linear's rows, and read its row scales if it is quantised.

        Raises: CheckpointError if a scale is not a positive finite number.
        """
        scale = load(reader.shards, linear).row_scale if linear.scale else None
        return cls(reader, linear, linear.shape(reader.shards), scale)

    @property
    def kind(self) -> WeightFormat:
        """How the linear is stored."""
        if self.linear.block_scale:
            return WeightFormat.NVFP4
        return WeightFormat.FP8 if self.linear.scale else WeightFormat.BF16

    def chunks(self, weights: int = CHUNK) -> Iterator[tuple[int, int]]:
        """Yield the first and last (excluded) row of each chunk."""
        rows, columns = self.shape
        step = max(1, weights // columns)
        return ((at, min(at + step, rows)) for at in range(0, rows, step))

    def amax(self, first: int, last: int) -> float:
        """Return the largest magnitude of some rows.

        Raises: CheckpointError naming the tensor if a value is infinite or NaN.
        """
        values = self.read(first, last)
        largest = float(np.abs(values).max())
        if not np.isfinite(largest):
            where = f"{self.reader.shards.placed(self.linear.codes)}, from row {first} on,"
            finite(values, where)
        return largest

    def narrow(self, first: int, last: int) -> Array:
        """Return rows as bf16 if they are stored so, else as float32."""
        linear = self.linear
        if self.scale is None and self.reader.shards.entry(linear.codes).dtype == DType.BF16.numpy:
            return self.reader.rows(linear.codes, first, last)
        return self.read(first, last)

    def read(self, first: int, last: int) -> Floats:
        """Return rows as float32 [last - first, K]."""
        linear, reader = self.linear, self.reader
        stored = reader.rows(linear.codes, first, last)
        if self.scale is None:
            return as_float32(stored)
        scale = self.scale[first:last, None]
        if not linear.block_scale:
            return as_float32(stored) * scale
        codes = np.stack([stored & 15, stored >> 4], axis=-1).reshape(len(stored), -1)
        blocks = reader.rows(linear.block_scale, first, last).astype(np.float32) * scale
        return np.multiply(E2M1[codes], np.repeat(blocks, NVFP4_GROUP, axis=1), dtype=np.float32)


def as_float32(values: Array) -> Floats:
    """Convert to float32; faster than numpy for BF16."""
    if values.dtype != DType.BF16.numpy:
        return values.astype(np.float32)
    return (values.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
