"""verify_attention: writes a block's key/value rows to the cache, then attends with its queries.

Dimensions
    T   rows     Hq, Hkv  query and key/value heads     D  head dimension     N  cache rows

Inputs
    q            rows [T, Hq * D]     k, v  rows [T, Hkv * D], before norm and rotation
    q_norm, k_norm  [D], RMSNorm over each head
    length       int32 [1], committed rows; row t is at position length + t
    cache_k, cache_v  f32/bf16/fp8 [Hkv, N, D]; keys after norm and rotation
    scale_k, scale_v  float32 [1]; stored = x / scale (1 if the checkpoint has no scales)
    shift        int32 [1]; row t turns by position length + t + shift (0 if absent)
    at           int32 [T, 3]; row t turns by these positions: time, height, width

Attributes
    mrope_height, mrope_width  pairs of columns that turn by height and width: of pair j, height if
                 j % 3 is 1 and j < 3 * mrope_height, width if j % 3 is 2 and j < 3 * mrope_width,
                 else time. Only calls with `at` have different positions.

Outputs
    o            rows [T, Hq * D]; the output gate is applied by the consumer
    next_cache_k, next_cache_v  the caches with rows length .. length + T - 1 written; may be
                 written in place. Rows at and past the committed length are never read before
                 they are written again, so rejected rows need no clean-up.

`shift` and `at` only turn queries and keys. Which cache rows are written, and what a row sees, goes
by its index: row t sees rows 0 .. length + t of the cache, including its own block's. The cache is
processed in tiles of `tile` rows that start at absolute multiples of `tile`, combined in order of
position: a row's result does not depend on where its block begins or how many rows it has. Nor does
it depend on later rows of its block, unless a value of these is not finite: its weight is zero, and
zero times NaN or infinity is NaN.

Source: Qwen3.5 modeling (transformers models/qwen3_5, apply_interleaved_mrope); running softmax,
Milakov and Gimelshein 2018.
"""

from pathlib import Path

from thor_dflash.core.tensors import DType
from thor_dflash.plugins.contract import ACTIVATION, CACHE, Attributes, Op, Port
from thor_dflash.plugins.verify_attention.reference import reference

TILE = 128
"""Rows of a cache tile. A cache has a whole number of tiles."""

_PLAIN = (DType.BF16, DType.F16, DType.F32)


def _derived(a: Attributes) -> dict[str, int]:
    return {"QD": a.integer("heads") * a.integer("head_dim")}


OP = Op(
    name="verify_attention",
    inputs=(
        Port("q", ACTIVATION, ("T", "QD")),
        Port("k", ACTIVATION, ("T", "KD")),
        Port("v", ACTIVATION, ("T", "KD")),
        Port("q_norm", _PLAIN, ("D",)),
        Port("k_norm", _PLAIN, ("D",)),
        Port("length", (DType.I32,), (1,)),
        Port("cache_k", CACHE, ("Hkv", "N", "D")),
        Port("cache_v", CACHE, ("Hkv", "N", "D")),
        Port("scale_k", (DType.F32,), (1,)),
        Port("scale_v", (DType.F32,), (1,)),
        Port("shift", (DType.I32,), (1,), optional=True),
        Port("at", (DType.I32,), ("T", 3), optional=True),
    ),
    outputs=(
        Port("o", ACTIVATION, ("T", "QD"), like="q"),
        Port("next_cache_k", CACHE, ("Hkv", "N", "D"), like="cache_k"),
        Port("next_cache_v", CACHE, ("Hkv", "N", "D"), like="cache_v"),
    ),
    attributes={
        "heads": 1,
        "kv_heads": 1,
        "head_dim": 256,
        "rotary_dim": 64,
        "rope_theta": 1e7,
        "norm_eps": 1e-6,
        "norm_offset": 1.0,
        "tile": TILE,
        "mrope_height": 0,
        "mrope_width": 0,
    },
    aliases={"next_cache_k": "cache_k", "next_cache_v": "cache_v"},
    derived=_derived,
    reference=reference,
    folder=Path(__file__).parent,
)
