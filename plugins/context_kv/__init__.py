"""context_kv: appends the keys and values of context rows to the ring of every drafter layer.

The projections before it (taps -> fc, then hidden_norm and each layer's k and v) are two `linear`
nodes; this operator does the rest: norm, rotation and writing to the ring.

Dimensions
    T   rows     Hkv  key/value heads     D  head dimension     N#  ring slots of layer #

Inputs
    length       int32 [1]; row t is context position length + t
    then per layer #
    k#, v#       rows [T, Hkv * D], before norm and rotation
    k_norm#      [D]
    ring_k#, ring_v#  rows [Hkv, N#, D]

Outputs
    next_ring_k#, next_ring_v#  slot (length + t) mod N# written; may be written in place

All T rows are written, committed or not: a row past the committed length is not visible until its
position is committed, and by then it has been written again. The ring must be T rows longer than
the window, so that an uncommitted row never overwrites a visible slot.

Source: vLLM qwen3_dflash.py precompute_and_store_context_kv.
"""

from pathlib import Path

from thor_dflash.core.tensors import DType
from thor_dflash.plugins.context_kv.reference import reference
from thor_dflash.plugins.contract import ACTIVATION, Attributes, Op, Port

_PLAIN = (DType.BF16, DType.F16, DType.F32)


def _repeats(a: Attributes) -> tuple[int, int]:
    return a.integer("layers"), a.integer("layers")


OP = Op(
    name="context_kv",
    inputs=(Port("length", (DType.I32,), (1,)),),
    group=(
        Port("k", ACTIVATION, ("T", "KD")),
        Port("v", ACTIVATION, ("T", "KD")),
        Port("k_norm", _PLAIN, ("D",)),
        Port("ring_k", ACTIVATION, ("Hkv", "N#", "D")),
        Port("ring_v", ACTIVATION, ("Hkv", "N#", "D")),
    ),
    outputs=(),
    out_group=(
        Port("next_ring_k", ACTIVATION, ("Hkv", "N#", "D"), like="ring_k#"),
        Port("next_ring_v", ACTIVATION, ("Hkv", "N#", "D"), like="ring_v#"),
    ),
    repeats=_repeats,
    attributes={
        "layers": 1,
        "kv_heads": 1,
        "head_dim": 128,
        "rotary_dim": 128,
        "rope_theta": 1e7,
        "norm_eps": 1e-6,
    },
    aliases={"next_ring_k#": "ring_k#", "next_ring_v#": "ring_v#"},
    reference=reference,
    folder=Path(__file__).parent,
)
