"""linear in numpy: the definition that every other implementation is tested against."""

from __future__ import annotations

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins.contract import Arrays, Attributes
from thor_dflash.plugins.numpy_math import (
    dequantise,
    gelu_erf,
    gelu_tanh,
    rms_norm,
    rounded,
    sigmoid,
    silu,
    wide,
)

GELU = {"gelu_tanh": gelu_tanh, "gelu_erf": gelu_erf}


def reference(x: Arrays, a: Attributes) -> dict[str, Array]:
    """See the operator's docstring for shapes."""
    dtype = DType.of(x["x"])
    rows = wide(rounded(prologue(x, a), dtype))
    y = [_project(x, rows, i) for i in range(a.integer("segments"))]
    if a.word("epilogue") == "swiglu":
        y = [silu(y[0]) * y[1]]
    elif a.word("epilogue") == "residual":
        y = [wide(x["residual"]) + y[0]]
    elif a.word("epilogue") in GELU:
        y = [GELU[a.word("epilogue")](one) for one in y]
    return {f"y{i}": rounded(value, dtype) for i, value in enumerate(y)}


def prologue(x: Arrays, a: Attributes) -> Array:
    """Returns the rows after norm and gate, before they are rounded."""
    rows = wide(x["x"])
    if "norm_weight" in x:
        width = a.integer("head_dim") or rows.shape[1]
        by_head = rows.reshape(rows.shape[0], -1, width)
        eps, offset = a.real("norm_eps"), a.real("norm_offset")
        rows = rms_norm(by_head, wide(x["norm_weight"]), eps, offset).reshape(rows.shape)
    if a.word("gate") == "sigmoid":
        rows = rows * sigmoid(wide(x["gate"]))
    elif a.word("gate") == "silu":
        rows = rows * silu(wide(x["gate"]))
    return rows


def _project(x: Arrays, rows: Array, i: int) -> Array:
    y = rows @ dequantise(x[f"weight{i}"], x.get(f"block_scale{i}")).T
    y = y * wide(x[f"row_scale{i}"]) if f"row_scale{i}" in x else y
    return y + wide(x[f"bias{i}"]) if f"bias{i}" in x else y
