"""rms_norm as an ONNX function."""

from __future__ import annotations

from collections.abc import Mapping

from thor_dflash.plugins import onnx_math
from thor_dflash.plugins.contract import Attributes
from thor_dflash.plugins.onnx_builder import FunctionBuilder, Inputs


def body(b: FunctionBuilder, x: Inputs, a: Attributes) -> Mapping[str, str]:
    """See the operator's docstring for shapes."""
    weight = x.f32(b, "weight")
    y = onnx_math.rms_norm(b, x.f32(b, "x"), weight, a.real("eps"), a.real("offset"))
    return {"y": b.narrow(y, x.dtype("x"))}
