"""The values of a checkpoint's matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thor_dflash.builders.checkpoint.quantized_matrix import Matrix
from thor_dflash.plugins.numpy_math import dequantise


def values_of(matrix: Matrix) -> NDArray[Any]:
    """Returns float32 [N, K]."""
    values = dequantise(matrix.codes, matrix.block_scale)
    if matrix.row_scale is not None:
        values = values * matrix.row_scale[:, None]
    return values.astype(np.float32)
