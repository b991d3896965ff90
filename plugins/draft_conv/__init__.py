"""draft_conv: DFlash2's causal convolution over the rows of a block, with kernels made per row.

Dimensions
    T   rows of the block     H   hidden size     taps   rows that a result mixes
    G   groups of `group` neighbouring channels, H / group

Inputs
    x            rows [T, H]
    norm_weight  [H]; RMSNorm of x before the convolution
    dynamic      rows [T, 2 * taps * G]; kernels of row t, of both sides: side, tap, group
    base         [2, taps, H]; kernels that all rows share: side, tap, channel
    residual     rows [T, H]; added to the result

Attributes
    side         which kernels: 0 before a sublayer, 1 behind it
    group        channels that share a dynamic kernel
    norm_eps, norm_offset   as in `linear`

Outputs
    y            rows [T, H]: residual[t] + sum over taps of
                 (base[side, tap] + dynamic[t, side, tap, group of the channel]) * z[t - tap],
                 z the normed x, zero before row 0 (never the context's rows)

Rounding: float32 inside, rounded once, at the end.

Source: z-lab/dflash model.py GroupedDynamicCausalConv; vLLM qwen3_dflash2.py.
"""

from pathlib import Path

from thor_dflash.core.tensors import DType
from thor_dflash.plugins.contract import ACTIVATION, Op, Port
from thor_dflash.plugins.draft_conv.reference import reference

_PLAIN = (DType.BF16, DType.F16, DType.F32)

OP = Op(
    name="draft_conv",
    inputs=(
        Port("x", ACTIVATION, ("T", "H")),
        Port("norm_weight", _PLAIN, ("H",), optional=True),
        Port("dynamic", ACTIVATION, ("T", "K")),
        Port("base", _PLAIN, (2, "taps", "H")),
        Port("residual", ACTIVATION, ("T", "H"), optional=True),
    ),
    outputs=(Port("y", ACTIVATION, ("T", "H"), like="x"),),
    attributes={"side": 0, "taps": 2, "group": 16, "norm_eps": 1e-6, "norm_offset": 0.0},
    reference=reference,
    folder=Path(__file__).parent,
)
