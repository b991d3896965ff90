"""The ONNX body of every operator. Apart from `OPS`, so that the runtime never imports onnx."""

from __future__ import annotations

from collections.abc import Mapping

from thor_dflash.plugins.accept.onnx_body import body as accept
from thor_dflash.plugins.context_kv.onnx_body import body as context_kv
from thor_dflash.plugins.draft_attention.onnx_body import body as draft_attention
from thor_dflash.plugins.draft_conv.onnx_body import body as draft_conv
from thor_dflash.plugins.fill_drafts.onnx_body import body as fill_drafts
from thor_dflash.plugins.gdn.onnx_body import body as gdn
from thor_dflash.plugins.head.onnx_body import body as head
from thor_dflash.plugins.image_attention.onnx_body import body as image_attention
from thor_dflash.plugins.image_embed.onnx_body import body as image_embed
from thor_dflash.plugins.image_positions.onnx_body import body as image_positions
from thor_dflash.plugins.layer_norm.onnx_body import body as layer_norm
from thor_dflash.plugins.linear.onnx_body import body as linear
from thor_dflash.plugins.onnx_builder import BodyMaker
from thor_dflash.plugins.rms_norm.onnx_body import body as rms_norm
from thor_dflash.plugins.sample.onnx_body import body as sample
from thor_dflash.plugins.selector.onnx_body import body as selector
from thor_dflash.plugins.verify_attention.onnx_body import body as verify_attention

BODIES: Mapping[str, BodyMaker] = {
    "linear": linear,
    "gdn": gdn,
    "verify_attention": verify_attention,
    "draft_attention": draft_attention,
    "draft_conv": draft_conv,
    "context_kv": context_kv,
    "head": head,
    "selector": selector,
    "accept": accept,
    "sample": sample,
    "layer_norm": layer_norm,
    "image_attention": image_attention,
    "image_embed": image_embed,
    "rms_norm": rms_norm,
    "fill_drafts": fill_drafts,
    "image_positions": image_positions,
}
