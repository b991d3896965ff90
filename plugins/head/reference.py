"""head in numpy: the definition that every other implementation is tested against."""

from __future__ import annotations

import numpy as np

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins.contract import Arrays, Attributes
from thor_dflash.plugins.numpy_math import dequantise, rms_norm, rounded, wide


def reference(x: Arrays, a: Attributes) -> dict[str, Array]:
    """See the operator's docstring for shapes."""
    rows = rms_norm(wide(x["x"]), wide(x["norm_weight"]), a.real("norm_eps"), a.real("norm_offset"))
    rows = wide(rounded(rows, DType.of(x["x"])))
    logits = rows @ dequantise(x["weight0"], x.get("block_scale0")).T
    if "row_scale0" in x:
        logits = logits * wide(x["row_scale0"])
    chosen = logits.astype(np.float32)[:, : a.integer("vocab") or None]
    best = np.where(np.isnan(chosen).any(axis=1), -1, chosen.argmax(axis=1))
    if "id_map" in x:
        best = np.where(best < 0, -1, x["id_map"][best])
    return {"logits": logits.astype(np.float32), "best": best.astype(np.int32)}
