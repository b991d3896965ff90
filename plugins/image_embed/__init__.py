"""image_embed: puts rows of images in the place of text embeddings.

Dimensions
    T   tokens     H   hidden size     R   image rows of this step

Inputs
    x         rows [T, H], text embeddings; a row whose id is negative may hold anything
    ids       int32 [T]; id -1 - k takes row k of `image`
    image     rows [R, H]; rows that no id names may hold anything

Outputs
    y         rows [T, H]

Source: transformers models/qwen3_5, masked_scatter of image embeddings.
"""

from pathlib import Path

from thor_dflash.core.tensors import DType
from thor_dflash.plugins.contract import ACTIVATION, Op, Port
from thor_dflash.plugins.image_embed.reference import reference

OP = Op(
    name="image_embed",
    inputs=(
        Port("x", ACTIVATION, ("T", "H")),
        Port("ids", (DType.I32,), ("T",)),
        Port("image", ACTIVATION, ("R", "H")),
    ),
    outputs=(Port("y", ACTIVATION, ("T", "H"), like="x"),),
    attributes={},
    reference=reference,
    folder=Path(__file__).parent,
)
