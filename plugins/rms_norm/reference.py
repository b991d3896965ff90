"""rms_norm in numpy: the definition that every other implementation is tested against."""

from __future__ import annotations

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins.contract import Arrays, Attributes
from thor_dflash.plugins.numpy_math import rms_norm, rounded, wide


def reference(x: Arrays, a: Attributes) -> dict[str, Array]:
    """See the operator's docstring for shapes."""
    y = rms_norm(wide(x["x"]), wide(x["weight"]), a.real("eps"), a.real("offset"))
    return {"y": rounded(y, DType.of(x["x"]))}
