"""head: the final norm, the projection to the vocabulary, and the best id of each row.

Dimensions
    T   rows     H   hidden size     V   stored vocabulary rows

Inputs
    x            rows [T, H]
    norm_weight  [H]
    weight0, block_scale0, row_scale0   as in `linear`, [V, H]
    id_map       int32 [V]; the vocabulary id of each stored row (a reduced draft vocabulary)

Attributes
    vocab        rows below it may be chosen; the others are padding. 0 means all may be
    norm_eps, norm_offset   as in `linear`

Outputs
    logits       float32 [T, V], including padding, not masked: the model's raw output, for scoring
    best         int32 [T], vocabulary id of the largest logit below `vocab`, the first among
                 equals; -1 if one of these logits is NaN

Source: Qwen3.5 modeling; the reduced draft vocabulary follows EAGLE-3's d2t map.
"""

from pathlib import Path

from thor_dflash.core.tensors import DType
from thor_dflash.plugins.contract import ACTIVATION, Op, Port
from thor_dflash.plugins.head.reference import reference

_PLAIN = (DType.BF16, DType.F16, DType.F32)

OP = Op(
    name="head",
    inputs=(
        Port("x", ACTIVATION, ("T", "H")),
        Port("norm_weight", _PLAIN, ("H",)),
        Port("weight0", (DType.U8, DType.FP8, *_PLAIN), ("V", "C")),
        Port("block_scale0", (DType.FP8,), ("V", "B"), optional=True),
        Port("row_scale0", (DType.F32,), ("V",), optional=True),
        Port("id_map", (DType.I32,), ("V",), optional=True),
    ),
    outputs=(Port("logits", (DType.F32,), ("T", "V")), Port("best", (DType.I32,), ("T",))),
    attributes={"vocab": 0, "norm_eps": 1e-6, "norm_offset": 0.0},
    reference=reference,
    folder=Path(__file__).parent,
)
