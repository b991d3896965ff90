"""draft_conv as an ONNX function: one product and sum per tap."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from thor_dflash.plugins import onnx_math
from thor_dflash.plugins.contract import Attributes
from thor_dflash.plugins.onnx_builder import FunctionBuilder, Inputs


def body(b: FunctionBuilder, x: Inputs, a: Attributes) -> Mapping[str, str]:
    """See the operator's docstring for shapes."""
    side, taps, group = (a.integer(n) for n in ("side", "taps", "group"))
    z = x.f32(b, "x")
    if "norm_weight" in x:
        weight = x.f32(b, "norm_weight")
        z = onnx_math.rms_norm(b, z, weight, a.real("norm_eps"), a.real("norm_offset"))
    # [T, 2, taps, G, 1] and [2, taps, G, group]: only rows and groups have no constant size.
    dynamic = b.reshape(x.f32(b, "dynamic"), 0, 2, taps, -1, 1)
    base = b.reshape(x.f32(b, "base"), 2, taps, -1, group)
    y = x.f32(b, "residual") if "residual" in x else ""
    for tap in range(taps):
        own = _pick(b, _pick(b, dynamic, 1, side), 1, tap)
        shared = _pick(b, _pick(b, base, 0, side), 0, tap)
        kernel = b.reshape(b.op("Add", own, shared), 0, -1)
        product = b.op("Mul", kernel, _delayed(b, z, tap))
        y = b.op("Add", y, product) if y else product
    return {"y": b.narrow(y, x.dtype("x"))}


def _pick(b: FunctionBuilder, x: str, axis: int, index: int) -> str:
    return b.op("Gather", x, b.scalar(index), axis=axis)


def _delayed(b: FunctionBuilder, z: str, tap: int) -> str:
    """Returns row t - tap in the place of row t, zeros before row 0."""
    if tap == 0:
        return z
    padded = b.op("Pad", z, b.i64(tap, 0, 0, 0), b.const(np.array(0, np.float32)))
    return b.take(padded, 0, -tap, 0)
