"""image_embed as an ONNX function: a gather over the rows of both."""

from __future__ import annotations

from collections.abc import Mapping

from thor_dflash.core.tensors import DType
from thor_dflash.plugins.contract import Attributes
from thor_dflash.plugins.onnx_builder import FunctionBuilder, Inputs


def body(b: FunctionBuilder, x: Inputs, a: Attributes) -> Mapping[str, str]:
    """See the operator's docstring for shapes."""
    del a
    count = b.op("Squeeze", b.op("Shape", x["ids"]))
    steps = b.op("Range", b.scalar(0), count, b.scalar(1))
    ids = b.cast(x["ids"], DType.I64)
    # Rows of text, then rows of images: only indices are chosen, so no type of rows needs a cast.
    behind = b.op("Sub", b.op("Sub", count, b.scalar(1)), ids)
    row = b.op("Where", b.op("Less", ids, b.scalar(0)), behind, steps)
    return {"y": b.op("Gather", b.concat(0, x["x"], x["image"]), row, axis=0)}
