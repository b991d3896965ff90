"""layer_norm: LayerNorm over the columns of rows, with weight and bias.

Dimensions
    T   rows     C   columns     F   rows that the result joins, `fold`

Inputs
    x         rows [T, C]
    weight    [C]     bias   float32 [C]

Attributes
    fold      consecutive rows of the result that are side by side: 4 in a vision tower's merger
    rows, columns   T and C; T is a multiple of `fold`
    eps       added to the variance

Outputs
    y         rows [T / F, F * C]: (x - mean) / sqrt(variance + eps) * weight + bias

Rounding: float32 inside, rounded once, at the end.

Source: Ba, Kiros and Hinton 2016; transformers models/qwen3_5 Qwen3_5VisionPatchMerger.
"""

from pathlib import Path

from thor_dflash.core.tensors import DType
from thor_dflash.plugins.contract import ACTIVATION, Attributes, Op, Port
from thor_dflash.plugins.layer_norm.reference import reference

_PLAIN = (DType.BF16, DType.F16, DType.F32)


def _derived(a: Attributes) -> dict[str, int]:
    fold = a.integer("fold")
    return {"M": a.integer("rows") // fold, "W": a.integer("columns") * fold}


OP = Op(
    name="layer_norm",
    inputs=(
        Port("x", ACTIVATION, ("T", "C")),
        Port("weight", _PLAIN, ("C",)),
        Port("bias", (DType.F32,), ("C",)),
    ),
    outputs=(Port("y", ACTIVATION, ("M", "W"), like="x"),),
    attributes={"rows": 0, "columns": 0, "fold": 1, "eps": 1e-6},
    derived=_derived,
    reference=reference,
    folder=Path(__file__).parent,
)
