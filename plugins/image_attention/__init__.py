"""image_attention: every patch of an image attends to every patch of it.

Dimensions
    P   patches     Q   3 * heads * head_dim

Inputs
    qkv       rows [P, Q]: queries, keys, values, each heads x head_dim
    row, column   int32 [P], a patch's place in the image
    count     int32 [1], patches of the image; those after it are padding and may hold anything

Outputs
    o         rows [P, heads * head_dim]; zeros for padding

All columns of a head are rotated: with F = head_dim / 4 frequencies f_j = theta^(-2j / (2F)), pair
(j, j + 2F) turns by row * f_j for j < F, and by column * f_(j - F) after that. No mask and no
causality: an image is one segment.

Rounding: queries and keys are rounded to the rows' type after the rotation; scores, softmax and
sums are float32; the result is rounded once.

Source: transformers models/qwen3_5 Qwen3_5VisionAttention, apply_rotary_pos_emb_vision; Dao 2023.
"""

from pathlib import Path

from thor_dflash.core.tensors import DType
from thor_dflash.plugins.contract import ACTIVATION, Attributes, Op, Port
from thor_dflash.plugins.image_attention.reference import reference


def _derived(a: Attributes) -> dict[str, int]:
    return {"O": a.integer("heads") * a.integer("head_dim")}


OP = Op(
    name="image_attention",
    inputs=(
        Port("qkv", ACTIVATION, ("P", "Q")),
        Port("row", (DType.I32,), ("P",)),
        Port("column", (DType.I32,), ("P",)),
        Port("count", (DType.I32,), (1,)),
    ),
    outputs=(Port("o", ACTIVATION, ("P", "O"), like="qkv"),),
    attributes={"heads": 1, "head_dim": 72, "rope_theta": 1e4},
    derived=_derived,
    reference=reference,
    folder=Path(__file__).parent,
)
