"""Published models by name, whole or with fewer layers, and their config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from thor_dflash.builders.synthetic import QWEN36_27B, SHAPES
from thor_dflash.core.errors import ConfigError
from thor_dflash.core.message_text import show
from thor_dflash.core.model_dims import DrafterDims, TargetDims

INTERVAL = 4
"""Every fourth layer is attention."""


def _smaller(
    hidden: int, intermediate: int, layers: int, heads: int, kv: int, values: int, *, tied: bool
) -> TargetDims:
    return replace(
        QWEN36_27B,
        hidden=hidden,
        intermediate=intermediate,
        layers=("gdn", "gdn", "gdn", "attention") * (layers // INTERVAL),
        attention=replace(QWEN36_27B.attention, heads=heads, kv_heads=kv),
        gdn=replace(QWEN36_27B.gdn, value_heads=values),
        tied=tied,
    )


TARGETS: Mapping[str, TargetDims] = {
    "qwen3.5-0.8b": _smaller(1024, 3584, 24, 8, 2, 16, tied=True),
    "qwen3.5-2b": _smaller(2048, 6144, 24, 8, 2, 16, tied=True),
    "qwen3.5-4b": _smaller(2560, 9216, 32, 16, 4, 32, tied=True),
    "qwen3.5-9b": _smaller(4096, 12288, 32, 16, 4, 32, tied=False),
    **{name: pair[0] for name, pair in SHAPES.items()},
}
"""Source: config.json of the repositories Qwen/Qwen3.5-0.8B and so on."""
DRAFTERS: Mapping[str, DrafterDims] = {name: pair[1] for name, pair in SHAPES.items()}


def target_shape(name: str, layers: int | None) -> TargetDims:
    """Return a target's sizes, cut to `layers` if given.

    Raises: ConfigError.
    """
    if name not in TARGETS:
        raise ConfigError(f"--shape must be {' or '.join(TARGETS)} (got {show(name)})")
    dims = TARGETS[name]
    depth = len(dims.layers)
    if layers is None:
        return dims
    if not 0 < layers <= depth or layers % INTERVAL:
        raise ConfigError(f"--layers must be a multiple of {INTERVAL} up to {depth} (got {layers})")
    return replace(dims, layers=dims.layers[:layers])


def drafter_shape(name: str, layers: int | None) -> DrafterDims:
    """Return the sizes of a target's drafter; for a target cut to `layers` it reads as many layers,
    as far apart as before.

    Raises: ConfigError.
    """
    if name not in DRAFTERS:
        raise ConfigError(
            f"--shape must be {' or '.join(DRAFTERS)} for a drafter (got {show(name)})"
        )
    dims, depth = DRAFTERS[name], len(TARGETS[name].layers)
    count = len(target_shape(name, layers).layers)
    taps = tuple(tap * count // depth for tap in dims.taps)
    if len(set(taps)) != len(taps):
        raise ConfigError(f"--layers must be enough for {len(taps)} taps (got {layers})")
    return replace(dims, taps=taps, target_layers=count)


def _common(dims: TargetDims | DrafterDims) -> dict[str, Any]:
    return {
        "vocab_size": dims.vocab,
        "hidden_size": dims.hidden,
        "intermediate_size": dims.intermediate,
        "num_hidden_layers": len(dims.layers),
        "num_attention_heads": dims.attention.heads,
        "num_key_value_heads": dims.attention.kv_heads,
        "head_dim": dims.attention.head_dim,
        "max_position_embeddings": dims.max_position,
        "rms_norm_eps": dims.eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "dtype": "bfloat16",
    }


def target_config(dims: TargetDims) -> dict[str, Any]:
    """Return the config.json of a target, as of the multimodal model."""
    a, g = dims.attention, dims.gdn
    rope = {
        "rope_type": "default",
        "rope_theta": a.rope_theta,
        "partial_rotary_factor": a.rotary_dim / a.head_dim,
        "mrope_interleaved": True,
    }
    kinds = {"gdn": "linear_attention", "attention": "full_attention"}
    text = {
        **_common(dims),
        "model_type": "qwen3_5_text",
        "layer_types": [kinds[kind] for kind in dims.layers],
        "full_attention_interval": INTERVAL,
        "attn_output_gate": True,
        "linear_num_key_heads": g.key_heads,
        "linear_num_value_heads": g.value_heads,
        "linear_key_head_dim": g.key_dim,
        "linear_value_head_dim": g.value_dim,
        "linear_conv_kernel_dim": g.conv_kernel,
        "rope_parameters": rope,
        "tie_word_embeddings": dims.tied,
    }
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": dims.tied,
        "text_config": text,
    }


def drafter_config(dims: DrafterDims) -> dict[str, Any]:
    """Return the config.json of a drafter."""
    flash: dict[str, Any] = {
        "mask_token_id": dims.mask_token,
        "target_layer_ids": list(dims.taps),
        "block_size": dims.block,
    }
    if dims.conv is not None and dims.selector is not None:
        flash |= {"conv_kernel_size": dims.conv.taps, "conv_group_size": dims.conv.group}
        flash |= {"selector_rank": dims.selector.rank, "selector_top_k": dims.selector.top_k}
    window = max(layer.window for layer in dims.layers)
    kinds = ["sliding_attention" if layer.window else "full_attention" for layer in dims.layers]
    return {
        **_common(dims),
        "architectures": ["DFlash2DraftModel" if dims.conv else "DFlashDraftModel"],
        "model_type": "qwen3",
        "layer_types": kinds,
        "use_sliding_window": window > 0,
        "sliding_window": window or None,
        "is_causal": [layer.causal for layer in dims.layers],
        "rope_theta": dims.attention.rope_theta,
        "num_target_layers": dims.target_layers,
        "tie_word_embeddings": False,
        "dflash_config": flash,
    }
