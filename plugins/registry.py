"""The kernels of all operators, and of the standard nodes that our graphs use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from thor_dflash import plugins
from thor_dflash.plugins.accept import launch as accept
from thor_dflash.plugins.context_kv import launch as context_kv
from thor_dflash.plugins.draft_attention import launch as draft_attention
from thor_dflash.plugins.draft_conv import launch as draft_conv
from thor_dflash.plugins.fill_drafts import launch as fill_drafts
from thor_dflash.plugins.gdn import launch as gdn
from thor_dflash.plugins.head import launch as head
from thor_dflash.plugins.image_attention import launch as image_attention
from thor_dflash.plugins.image_embed import launch as image_embed
from thor_dflash.plugins.image_positions import launch as image_positions
from thor_dflash.plugins.launch import OpKernels
from thor_dflash.plugins.layer_norm import launch as layer_norm
from thor_dflash.plugins.linear import launch as linear
from thor_dflash.plugins.rms_norm import launch as rms_norm
from thor_dflash.plugins.sample import launch as sample
from thor_dflash.plugins.selector import launch as selector
from thor_dflash.plugins.standard import launch as standard
from thor_dflash.plugins.verify_attention import launch as verify_attention

ROOT = Path(plugins.__file__).parent

KERNELS: Mapping[str, OpKernels] = {
    kernels.op.name: kernels
    for kernels in (
        linear.KERNELS,
        head.KERNELS,
        gdn.KERNELS,
        verify_attention.KERNELS,
        draft_attention.KERNELS,
        draft_conv.KERNELS,
        context_kv.KERNELS,
        selector.KERNELS,
        accept.KERNELS,
        sample.KERNELS,
        layer_norm.KERNELS,
        image_attention.KERNELS,
        image_positions.KERNELS,
        image_embed.KERNELS,
        rms_norm.KERNELS,
        fill_drafts.KERNELS,
        *standard.KERNELS,
    )
}
"""By the operator's name."""
