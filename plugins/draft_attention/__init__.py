"""draft_attention: a DFlash block attends to the drafter's key/value ring and to itself.

Dimensions
    T   rows of the block     Hq, Hkv  query and key/value heads     D  head dimension
    N   ring slots; position p lives in slot p mod N

Inputs
    q            rows [T, Hq * D]     k, v  rows [T, Hkv * D], before norm and rotation
    q_norm, k_norm  [D], RMSNorm over each head
    length       int32 [1], context positions: 0 .. length - 1; row t is at length + t
    window       int32 [1]; keys at distance 0 <= query - key < window are seen, 0 means all
    first        int32 [1]; context positions before it were never written to the ring
    ring_k, ring_v  rows [Hkv, N, D], as written by context_kv

Attributes
    causal       1: row t sees rows 0..t of the block; 0: it sees all of them

Outputs
    o            rows [T, Hq * D]

The block's own keys and values are used and then discarded; this node does not write to the ring.
Without causality, a window bounds the distance on both sides (bidirectional sliding layers).

Source: z-lab DFlash model.py (per-layer causality rule), vLLM qwen3_dflash.py.
"""

from pathlib import Path

from thor_dflash.core.tensors import DType
from thor_dflash.plugins.contract import ACTIVATION, Attributes, Op, Port
from thor_dflash.plugins.draft_attention.reference import reference

_PLAIN = (DType.BF16, DType.F16, DType.F32)


def _derived(a: Attributes) -> dict[str, int]:
    return {"QD": a.integer("heads") * a.integer("head_dim")}


OP = Op(
    name="draft_attention",
    inputs=(
        Port("q", ACTIVATION, ("T", "QD")),
        Port("k", ACTIVATION, ("T", "KD")),
        Port("v", ACTIVATION, ("T", "KD")),
        Port("q_norm", _PLAIN, ("D",)),
        Port("k_norm", _PLAIN, ("D",)),
        Port("length", (DType.I32,), (1,)),
        Port("window", (DType.I32,), (1,)),
        Port("first", (DType.I32,), (1,)),
        Port("ring_k", ACTIVATION, ("Hkv", "N", "D")),
        Port("ring_v", ACTIVATION, ("Hkv", "N", "D")),
    ),
    outputs=(Port("o", ACTIVATION, ("T", "QD"), like="q"),),
    attributes={
        "heads": 1,
        "kv_heads": 1,
        "head_dim": 128,
        "rotary_dim": 128,
        "rope_theta": 1e7,
        "norm_eps": 1e-6,
        "causal": 0,
    },
    derived=_derived,
    reference=reference,
    folder=Path(__file__).parent,
)
