"""layer_norm in numpy: the definition that every other implementation is tested against."""

from __future__ import annotations

import numpy as np

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins.contract import Arrays, Attributes
from thor_dflash.plugins.numpy_math import rounded, wide


def reference(x: Arrays, a: Attributes) -> dict[str, Array]:
    """See the operator's docstring for shapes."""
    rows = wide(x["x"])
    centred = rows - rows.mean(axis=1, keepdims=True)
    root = np.sqrt(np.mean(centred**2, axis=1, keepdims=True) + a.real("eps"))
    y = centred / root * wide(x["weight"]) + wide(x["bias"])
    return {"y": rounded(y.reshape(len(rows) // a.integer("fold"), -1), DType.of(x["x"]))}
