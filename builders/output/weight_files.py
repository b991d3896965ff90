"""The weight files of a package: the offset of each tensor, and writing the files.

Offsets follow from names, types and shapes alone. So graphs can be made before, after or without
writing the files, and a resumed build finds the same layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from thor_dflash.core.tensors import Array, DType

ALIGNMENT = 4096
"""Tensors begin on page boundaries, so that each can be memory-mapped alone, bytes."""

PIECE = 64 << 20
"""Bytes written at a time, so that an embedding table of gigabytes still shows progress."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a weight file."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    file: str
    """Path relative to the package."""
    offset: int
    """Offset in the file, bytes."""

    @property
    def nbytes(self) -> int:
        """Size, bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.bytes


@dataclass(frozen=True, slots=True)
class _Source:
    stored: StoredTensor
    make: Callable[[], Array]


@dataclass(slots=True)
class WeightFiles:
    """Tensors by file, in the order they were added."""

    _sources: dict[str, list[_Source]] = field(default_factory=dict[str, list[_Source]])
    _names: dict[str, StoredTensor] = field(default_factory=dict[str, StoredTensor])

    def add(
        self, file: str, name: str, dtype: DType, shape: Sequence[int], make: Callable[[], Array]
    ) -> StoredTensor:
        """Place a tensor at the end of a file. `make` is called when the file is written."""
        assert name not in self._names, name
        sources = self._sources.setdefault(file, [])
        end = sources[-1].stored.offset + sources[-1].stored.nbytes if sources else 0
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        stored = StoredTensor(name, dtype, tuple(shape), file, offset)
        sources.append(_Source(stored, make))
        self._names[name] = stored
        return stored

    def stored(self, name: str) -> StoredTensor:
        """Return where a tensor is stored."""
        return self._names[name]

    def array(self, name: str) -> Array:
        """Return a tensor's value."""
        sources = self._sources[self._names[name].file]
        return next(s.make() for s in sources if s.stored.name == name)

    @property
    def files(self) -> tuple[str, ...]:
        """All files, in the order in which they got their first tensor."""
        return tuple(self._sources)

    def nbytes(self, file: str) -> int:
        """Return the size of one file, bytes."""
        last = self._sources[file][-1].stored
        return last.offset + last.nbytes

    def write(self, file: str, advance: Callable[[int], None], path: Path) -> None:
        """Write one file, a tensor at a time; `advance` gets the counts of bytes written."""
        with path.open("wb") as out:
            for source in self._sources[file]:
                stored, value = source.stored, np.ascontiguousarray(source.make())
                assert value.shape == stored.shape, (stored, value.shape)
                assert DType.of(value) is stored.dtype, (stored, value.dtype)
                padding = stored.offset - out.tell()
                out.write(b"\0" * padding)
                advance(padding)
                data = value.reshape(-1).view(np.uint8)
                for start in range(0, len(data), PIECE):
                    advance(out.write(data[start : start + PIECE].data))
