"""Names, element types and shapes of tensors, shared by all modules. Allocates no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
"""A numpy array of any element type, ml_dtypes' included."""


class DType(Enum):
    """Element types; the value is the numpy (or ml_dtypes) name."""

    F32 = "float32"
    F16 = "float16"
    BF16 = "bfloat16"
    FP8 = "float8_e4m3fn"
    U8 = "uint8"
    I32 = "int32"
    I64 = "int64"
    BOOL = "bool"

    @property
    def numpy(self) -> np.dtype[Any]:
        """The numpy element type."""
        return _NUMPY[self._value_]

    @property
    def bytes(self) -> int:
        """Size of one element, bytes."""
        return self.numpy.itemsize

    @classmethod
    def of(cls, array: Array) -> DType:
        """The element type of an array. Raises ValueError for one outside this list."""
        return cls(array.dtype.name)


_NUMPY: dict[str, np.dtype[Any]] = {
    dtype.value: np.dtype(kind)
    for dtype, kind in {
        DType.F32: np.float32,
        DType.F16: np.float16,
        DType.BF16: ml_dtypes.bfloat16,
        DType.FP8: ml_dtypes.float8_e4m3fn,
        DType.U8: np.uint8,
        DType.I32: np.int32,
        DType.I64: np.int64,
        DType.BOOL: np.bool_,
    }.items()
}
"""Keyed by value for speed: hashing an Enum member runs Python code."""

Dims = Mapping[str, int]
"""Values of the symbolic sizes of a spec, such as {"T": 16}."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor's name, type and shape. A name in `shape` is a symbolic size, bound by a Dims."""

    name: str
    dtype: DType
    shape: tuple[int | str, ...]

    def at(self, dims: Dims) -> tuple[int, ...]:
        """The shape with every symbolic size replaced."""
        return tuple(d if isinstance(d, int) else dims[d] for d in self.shape)

    def nbytes(self, dims: Dims) -> int:
        """Size in bytes at these dims."""
        size = self.dtype.bytes
        for n in self.at(dims):
            size *= n
        return size

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype.value}[{', '.join(map(str, self.shape))}]"
