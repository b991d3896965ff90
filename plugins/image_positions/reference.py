"""image_positions in numpy: the definition that every other implementation is tested against."""

from __future__ import annotations

import numpy as np

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins.contract import Arrays, Attributes
from thor_dflash.plugins.numpy_math import rounded, wide


def reference(x: Arrays, a: Attributes) -> dict[str, Array]:
    """See the operator's docstring for shapes."""
    del a
    taps = wide(x["table"])[x["taps"]]
    return {"y": rounded(np.einsum("pic,pi->pc", taps, wide(x["weights"])), DType.of(x["table"]))}
