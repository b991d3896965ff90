"""image_positions: rows of a position table, resampled to the grid of an image.

Dimensions
    P   patches     S   rows of the table, a square grid     C   columns

Inputs
    table     [S, C], learned positions
    taps      int32 [P, 4], rows of the table
    weights   float32 [P, 4]

Outputs
    y         activations [P, C]: sum over i of weights[i] * table[taps[i]]

Rounding: float32 inside, rounded once, at the end. The host computes taps and weights
(runtime/vision/patch_grid.py); a patch that is padding has weights 0.

Source: transformers models/qwen3_5 fast_pos_embed_interpolate.
"""

from pathlib import Path

from thor_dflash.core.tensors import DType
from thor_dflash.plugins.contract import ACTIVATION, Op, Port
from thor_dflash.plugins.image_positions.reference import reference

TAPS = 4

OP = Op(
    name="image_positions",
    inputs=(
        Port("table", ACTIVATION, ("S", "C")),
        Port("taps", (DType.I32,), ("P", TAPS)),
        Port("weights", (DType.F32,), ("P", TAPS)),
    ),
    outputs=(Port("y", ACTIVATION, ("P", "C"), like="table"),),
    attributes={},
    reference=reference,
    folder=Path(__file__).parent,
)
