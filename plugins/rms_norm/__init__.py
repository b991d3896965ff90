"""rms_norm: RMSNorm over the columns of rows, where no product follows that could do it.

Dimensions
    T   rows     C   columns

Inputs
    x         rows [T, C]
    weight    [C]

Attributes
    eps, offset   as in `linear`: y = x / rms(x) * (offset + weight)

Outputs
    y         rows [T, C]

Rounding: float32 inside, rounded once, at the end.

Source: Zhang and Sennrich 2019; Qwen3.5 modeling (transformers models/qwen3_5).
"""

from pathlib import Path

from thor_dflash.core.tensors import DType
from thor_dflash.plugins.contract import ACTIVATION, Op, Port
from thor_dflash.plugins.rms_norm.reference import reference

_PLAIN = (DType.BF16, DType.F16, DType.F32)

OP = Op(
    name="rms_norm",
    inputs=(Port("x", ACTIVATION, ("T", "C")), Port("weight", _PLAIN, ("C",))),
    outputs=(Port("y", ACTIVATION, ("T", "C"), like="x"),),
    attributes={"eps": 1e-6, "offset": 0.0},
    reference=reference,
    folder=Path(__file__).parent,
)
