"""The fused operators, one folder each. `OPS` lists all of them; nothing registers itself.

In a folder, `__init__.py` holds the contract, `reference.py` the definition in numpy float64 and
the test cases, `onnx_body.py` the ONNX function, `launch.py` the launch rule of the CUDA kernels.
"""

from thor_dflash.plugins.accept import OP as ACCEPT
from thor_dflash.plugins.context_kv import OP as CONTEXT_KV
from thor_dflash.plugins.contract import Op
from thor_dflash.plugins.draft_attention import OP as DRAFT_ATTENTION
from thor_dflash.plugins.draft_conv import OP as DRAFT_CONV
from thor_dflash.plugins.fill_drafts import OP as FILL_DRAFTS
from thor_dflash.plugins.gdn import OP as GDN
from thor_dflash.plugins.head import OP as HEAD
from thor_dflash.plugins.image_attention import OP as IMAGE_ATTENTION
from thor_dflash.plugins.image_embed import OP as IMAGE_EMBED
from thor_dflash.plugins.image_positions import OP as IMAGE_POSITIONS
from thor_dflash.plugins.layer_norm import OP as LAYER_NORM
from thor_dflash.plugins.linear import OP as LINEAR
from thor_dflash.plugins.rms_norm import OP as RMS_NORM
from thor_dflash.plugins.sample import OP as SAMPLE
from thor_dflash.plugins.selector import OP as SELECTOR
from thor_dflash.plugins.verify_attention import OP as VERIFY_ATTENTION

OPS: tuple[Op, ...] = (
    LINEAR,
    GDN,
    VERIFY_ATTENTION,
    DRAFT_ATTENTION,
    DRAFT_CONV,
    CONTEXT_KV,
    HEAD,
    SELECTOR,
    ACCEPT,
    SAMPLE,
    LAYER_NORM,
    IMAGE_ATTENTION,
    IMAGE_POSITIONS,
    IMAGE_EMBED,
    RMS_NORM,
    FILL_DRAFTS,
)

__all__ = [
    "ACCEPT",
    "CONTEXT_KV",
    "DRAFT_ATTENTION",
    "DRAFT_CONV",
    "FILL_DRAFTS",
    "GDN",
    "HEAD",
    "IMAGE_ATTENTION",
    "IMAGE_EMBED",
    "IMAGE_POSITIONS",
    "LAYER_NORM",
    "LINEAR",
    "OPS",
    "RMS_NORM",
    "SAMPLE",
    "SELECTOR",
    "VERIFY_ATTENTION",
    "Op",
]
