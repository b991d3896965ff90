"""context_kv in numpy: the definition that every other implementation is tested against."""

from __future__ import annotations

import numpy as np

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins.contract import Arrays, Attributes
from thor_dflash.plugins.numpy_math import rms_norm, rope, rounded, wide


def reference(x: Arrays, a: Attributes) -> dict[str, Array]:
    """See the operator's docstring for shapes."""
    out: dict[str, Array] = {}
    for i in range(a.integer("layers")):
        rows = len(x[f"k{i}"])
        at = int(x["length"][0]) + np.arange(rows)
        shape = (rows, a.integer("kv_heads"), a.integer("head_dim"))
        k = rms_norm(
            wide(x[f"k{i}"]).reshape(shape), wide(x[f"k_norm{i}"]), a.real("norm_eps"), 0.0
        )
        k = rope(k, at, a.integer("rotary_dim"), a.real("rope_theta"))
        for name, fresh in (("k", k), ("v", wide(x[f"v{i}"]).reshape(shape))):
            ring = x[f"ring_{name}{i}"].copy()
            for t, position in enumerate(at):
                ring[:, position % ring.shape[1]] = rounded(fresh[t], DType.of(ring))
            out[f"next_ring_{name}{i}"] = ring
    return out
