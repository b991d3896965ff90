"""context_kv as an ONNX function: one scatter per ring."""

from __future__ import annotations

from collections.abc import Mapping

from thor_dflash.plugins import onnx_math
from thor_dflash.plugins.contract import Attributes
from thor_dflash.plugins.onnx_builder import FunctionBuilder, Inputs


def body(b: FunctionBuilder, x: Inputs, a: Attributes) -> Mapping[str, str]:
    """See the operator's docstring for shapes."""
    kv, dim = a.integer("kv_heads"), a.integer("head_dim")
    at = onnx_math.positions(b, x["length"], x["k0"])
    out: dict[str, str] = {}
    for i in range(a.integer("layers")):
        k = b.reshape(x.f32(b, f"k{i}"), 0, kv, dim)
        k = onnx_math.rms_norm(b, k, x.f32(b, f"k_norm{i}"), a.real("norm_eps"), 0.0)
        k = onnx_math.rope(b, k, at, dim, a.integer("rotary_dim"), a.real("rope_theta"))
        k = b.op("Transpose", k, perm=(1, 0, 2))
        v = onnx_math.heads_first(b, x.f32(b, f"v{i}"), kv, dim)
        for name, rows in (("k", k), ("v", v)):
            ring = x[f"ring_{name}{i}"]
            slots = b.op("Mod", at, b.op("Shape", ring, start=1, end=2))
            rows = b.narrow(rows, x.dtype(f"ring_{name}{i}"))
            out[f"next_ring_{name}{i}"] = onnx_math.scatter_rows(b, ring, rows, slots, kv)
    return out
