"""linear: matrix products of rows with stored weights, with the surrounding operations fused in.

Dimensions
    T   rows       K   input features       N#  output features of weight #
    C#  stored columns of weight #: K, or K/2 bytes of FP4 codes

Inputs
    x             rows [T, K]
    norm_weight   bf16/f32 [K] or [head_dim]; prologue RMSNorm (over K, or over each head of
                  `head_dim` columns if that attribute is set)
    gate          rows [T, K]; prologue gate
    residual      rows [T, N0]; added in the epilogue
    then per segment #
    weight#       uint8 [N#, K/2] NVFP4 codes | fp8 [N#, K] | bf16/f16/f32 [N#, K]
    block_scale#  fp8 E4M3 [N#, K/16]; NVFP4 only
    row_scale#    float32 [N#]; NVFP4 (the global scale) and FP8
    bias#         float32 [N#]; added to the product

Attributes
    segments     number of weights multiplied by the same rows in one launch
    epilogue     "none": y# = x w#^T, one output per segment;
                 "swiglu": y0 = silu(x w0^T) * (x w1^T); "residual": y0 = residual + x w0^T;
                 "gelu_tanh", "gelu_erf": y0 = gelu(x w0^T), by tanh or exactly
    norm_eps, norm_offset   RMSNorm: x / rms(x) * (norm_offset + norm_weight)
    head_dim     width of the prologue norm; 0 means K
    gate         "none" | "sigmoid": x * sigmoid(gate) | "silu": norm(x) * silu(gate)

Outputs
    y#           rows [T, N#]

Rounding: the rows are rounded to the activations' type after the prologue, before the product;
products accumulate in float32; row_scale, bias, activation and residual are applied in float32;
the result is rounded once, at the end.

Source: Qwen3.5 modeling (transformers models/qwen3_5), modelopt NVFP4QTensor for the codes.
"""

from pathlib import Path

from thor_dflash.core.tensors import DType
from thor_dflash.plugins.contract import ACTIVATION, Attributes, Op, Port
from thor_dflash.plugins.linear.reference import reference

_WEIGHT = (DType.U8, DType.FP8, DType.BF16, DType.F16, DType.F32)
_PLAIN = (DType.BF16, DType.F16, DType.F32)


def _repeats(attributes: Attributes) -> tuple[int, int]:
    segments = attributes.integer("segments")
    return segments, 1 if attributes.word("epilogue") == "swiglu" else segments


OP = Op(
    name="linear",
    inputs=(
        Port("x", ACTIVATION, ("T", "K")),
        Port("norm_weight", _PLAIN, ("W",), optional=True),
        Port("gate", ACTIVATION, ("T", "K"), optional=True),
        Port("residual", ACTIVATION, ("T", "N0"), optional=True),
    ),
    group=(
        Port("weight", _WEIGHT, ("N#", "C#")),
        Port("block_scale", (DType.FP8,), ("N#", "B#"), optional=True),
        Port("row_scale", (DType.F32,), ("N#",), optional=True),
        Port("bias", (DType.F32,), ("N#",), optional=True),
    ),
    outputs=(),
    out_group=(Port("y", ACTIVATION, ("T", "N#"), like="x"),),
    repeats=_repeats,
    attributes={
        "segments": 1,
        "epilogue": "none",
        "norm_eps": 1e-6,
        "norm_offset": 0.0,
        "head_dim": 0,
        "gate": "none",
    },
    reference=reference,
    folder=Path(__file__).parent,
)
