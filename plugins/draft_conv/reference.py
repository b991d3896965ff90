"""draft_conv in numpy: the definition that every other implementation is tested against."""

from __future__ import annotations

import numpy as np

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins.contract import Arrays, Attributes
from thor_dflash.plugins.numpy_math import rms_norm, rounded, wide


def reference(x: Arrays, a: Attributes) -> dict[str, Array]:
    """See the operator's docstring for shapes."""
    side, taps, group = (a.integer(n) for n in ("side", "taps", "group"))
    z = wide(x["x"])
    if "norm_weight" in x:
        z = rms_norm(z, wide(x["norm_weight"]), a.real("norm_eps"), a.real("norm_offset"))
    rows, hidden = z.shape
    dynamic = wide(x["dynamic"]).reshape(rows, 2, taps, hidden // group)[:, side]
    kernel = wide(x["base"])[side] + np.repeat(dynamic, group, axis=2)
    y = wide(x["residual"]) if "residual" in x else np.zeros_like(z)
    for tap in range(min(taps, rows)):
        y[tap:] += kernel[tap:, tap] * z[: rows - tap]
    return {"y": rounded(y, DType.of(x["x"]))}
