"""config.json of published DFlash2 drafters."""

from __future__ import annotations

import json


def published(**changes: object) -> dict[str, object]:
    """That of z-lab/Qwen3.8-27B-DFlash2 at 50307d4c, in the order of the file."""
    flash = {"block_size": 8, "conv_group_size": 16, "conv_kernel_size": 2, "mask_token_id": 248070}
    flash |= {"selector_rank": 256, "selector_top_k": 16}
    return {
        "architectures": ["DFlash2DraftModel"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": None, "is_causal": False,
        "dflash_config": {**flash, "target_layer_ids": [5, 19, 33, 47, 61]},
        "dtype": "bfloat16", "eos_token_id": 248044, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02,
        "intermediate_size": 17408, "layer_types": ["sliding_attention"] * 5,
        "max_position_embeddings": 262144, "max_window_layers": 5, "model_type": "qwen3",
        "num_attention_heads": 32, "num_hidden_layers": 5, "num_key_value_heads": 8,
        "num_target_layers": 64, "pad_token_id": 248044, "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
        "sliding_window": 2048, "tie_word_embeddings": False, "transformers_version": "5.15.0",
        "use_cache": True, "use_sliding_window": True, "vocab_size": 248320, **changes,
    }  # fmt: skip


MUSE: dict[str, object] = {
    "hidden_size": 6656, "intermediate_size": 19968, "vocab_size": 202048, "use_cache": False,
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}, "rms_norm_eps": 1e-05,
    "max_position_embeddings": 131072, "num_target_layers": 52, "bos_token_id": 200000,
    "dflash_config": {
        "block_size": 16, "conv_group_size": 16, "conv_kernel_size": 2, "mask_token_id": 201818,
        "selector_rank": 256, "selector_top_k": 16, "target_layer_ids": [1, 13, 25, 37, 49],
        "output_multiplier": 0.19611613513818404, "final_logit_softcapping": 20.0,
    },
}  # fmt: skip
"""What z-lab/Muse-Glimmer-30B-DFlash2 at b54ffdd1 has otherwise."""


def config_file() -> bytes:
    """The published file itself."""
    return (json.dumps(published(), indent=2) + "\n").encode()
