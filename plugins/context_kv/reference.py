"""context_kv in numpy: the definition that every other implementation is tested against."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins.contract import Arrays, Attributes, OpCase
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


def cases(rng: np.random.Generator) -> Iterator[OpCase]:
    """Rings of different lengths in one call; starts before, at and after the wrap-around."""
    kv, dim = 2, 16

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(np.float32)

    for dtype in (DType.F32, DType.BF16):
        for length in (0, 1, 20, 24, 39, 40, 41, 1000, 200_000) if dtype is DType.F32 else (39,):
            x: dict[str, Array] = {}
            for i, slots in enumerate((40, 40, 1200)):
                x |= {
                    f"k{i}": normal(16, kv * dim),
                    f"v{i}": normal(16, kv * dim),
                    f"ring_k{i}": normal(kv, slots, dim),
                    f"ring_v{i}": normal(kv, slots, dim),
                }
            x = {name: value.astype(dtype.numpy) for name, value in x.items()}
            x |= {f"k_norm{i}": 1 + normal(dim) / 3 for i in range(3)}
            x["length"] = np.array([length], np.int32)
            yield OpCase(
                f"at_{length}_{dtype.value}",
                x,
                {"layers": 3, "kv_heads": kv, "head_dim": dim, "rotary_dim": dim},
            )
