"""The fused operators, one folder each. `OPS` lists all of them; nothing registers itself.

In a folder, `__init__.py` holds the contract, `reference.py` the definition in numpy float64 and
the test cases, `onnx_body.py` the ONNX function, `launch.py` the launch rule of the CUDA kernels.
"""

from thor_dflash.plugins.accept import OP as ACCEPT
from thor_dflash.plugins.context_kv import OP as CONTEXT_KV
from thor_dflash.plugins.contract import Op
from thor_dflash.plugins.draft_attention import OP as DRAFT_ATTENTION
from thor_dflash.plugins.draft_conv import OP as DRAFT_CONV
from thor_dflash.plugins.gdn import OP as GDN
from thor_dflash.plugins.head import OP as HEAD
from thor_dflash.plugins.linear import OP as LINEAR
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
)

__all__ = [
    "ACCEPT",
    "CONTEXT_KV",
    "DRAFT_ATTENTION",
    "DRAFT_CONV",
    "GDN",
    "HEAD",
    "LINEAR",
    "OPS",
    "SAMPLE",
    "SELECTOR",
    "VERIFY_ATTENTION",
    "Op",
]
