"""One linear layer's weight as stored: codes, and the scales to dequantise them.

N is the number of rows (outputs), K the number of columns (inputs).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thor_dflash.core.errors import CheckpointError
from thor_dflash.core.tensors import Array


class WeightFormat(Enum):
    """How a matrix is stored. Determined by its tensors, never by the config."""

    NVFP4 = "nvfp4"
    FP8 = "fp8"
    BF16 = "bf16"
    F16 = "f16"
    F32 = "f32"


KINDS = {
    "uint8": WeightFormat.NVFP4,
    "float8_e4m3fn": WeightFormat.FP8,
    "bfloat16": WeightFormat.BF16,
    "float16": WeightFormat.F16,
    "float32": WeightFormat.F32,
}
"""Element type of the codes -> kind."""


_EXPONENT: Mapping[str, tuple[type[np.unsignedinteger[Any]], int]] = {
    "float8_e4m3fn": (np.uint8, 0x7F),
    "bfloat16": (np.uint16, 0x7F80),
    "float16": (np.uint16, 0x7C00),
    "float32": (np.uint32, 0x7F80_0000),
}
"""Element type -> unsigned type of its bits, and the bits that are all set in NaN and infinity."""
_PIECE = 1 << 24
"""Elements checked at a time."""


def finite(values: Array, name: str) -> Array:
    """Return the values unchanged, after checking those of floating-point types.

    Raises: CheckpointError if one is infinite or NaN.
    """
    bits, exponent = _EXPONENT.get(values.dtype.name, (np.uint8, 0))
    if not exponent:
        return values
    flat = values.reshape(-1)
    for start in range(0, flat.size, _PIECE):
        piece = flat[start : start + _PIECE]
        bad = np.flatnonzero((piece.view(bits) & bits(exponent)) == exponent)
        if bad.size:
            place = np.array(np.unravel_index(start + int(bad[0]), values.shape)).tolist()
            raise CheckpointError(
                f"{name} must hold finite numbers (got {float(piece[bad[0]])} at {place})"
            )
    return values


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """A weight [N, K]. Its arrays may be views of a mapped file: read them, do not write."""

    name: str
    """The linear's name without `.weight`, relative to the checkpoint's prefix."""
    codes: Array
    """NVFP4: uint8 [N, K/2], even k in the low nibble. FP8: float8_e4m3fn [N, K]. Else [N, K]."""
    block_scale: Array | None = None
    """NVFP4: float8_e4m3fn [N, K/16]. Row-major, not swizzled."""
    row_scale: NDArray[np.float32] | None = None
    """NVFP4 and FP8: float32 [N], a multiplier."""
    input_scale: float | None = None
    """NVFP4: largest calibrated input / (6 * 448), if the checkpoint has it and does not declare
    this linear W4A16; for products that quantise their input rows, too."""

    @property
    def kind(self) -> WeightFormat:
        """The format of the codes."""
        return KINDS[self.codes.dtype.name]
