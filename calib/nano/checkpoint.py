"""Saves and loads master weights, and writes the exported checkpoint directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from thor_dflash.calib.nano.dims import (
    VOCAB,
    NanoDrafterDims,
    NanoTargetDims,
    NanoTowerDims,
    tap_layers,
)
from thor_dflash.calib.nano.quant import global_scale, pack, unpack
from thor_dflash.core.model_dims import FRAMES, MERGE, PATCH

SHARD_BYTES = 15 << 20
"""Largest file of saved master weights, bytes."""
INPUT_GROUPS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("in_proj_qkv", "in_proj_z"),
)
"""Groups of linears that read the same input: each group shares one global scale, as in modelopt's
exporter."""
LINEARS = (
    *(name for group in INPUT_GROUPS for name in group),
    "o_proj",
    "out_proj",
    "down_proj",
    "fc",
)


def save_master(model: nn.Module, folder: Path, stem: str) -> None:
    """Write F32 master weights as shards ``<stem>.<i>.safetensors``, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    shard: dict[str, Tensor] = {}
    size, index = 0, 0
    for name, tensor in model.state_dict().items():
        if size + tensor.nbytes > SHARD_BYTES:
            _save(shard, folder / f"{stem}.{index}.safetensors")
            shard, size, index = {}, 0, index + 1
        shard[name] = tensor.detach().cpu().contiguous()
        size += tensor.nbytes
    _save(shard, folder / f"{stem}.{index}.safetensors")


def _save(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    part = path.with_suffix(".part")
    save_file(tensors, part, metadata=metadata)
    part.replace(path)


def load_master(model: nn.Module, folder: Path, stem: str) -> bool:
    """Load master weights if there are any. Returns whether there were."""
    shards = sorted(folder.glob(f"{stem}.*.safetensors"))
    state = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    if state:
        model.load_state_dict(state)
    return bool(state)


def export_weights(model: nn.Module, prefix: str, out: Path, *, quant: bool = True) -> None:
    """Write ``model.safetensors`` in modelopt's NVFP4 format; tensors that are not quantised, and
    all of them without `quant`, are BF16.
    """
    state = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    tensors: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if not (quant and is_quantised(name)):
            tensors[prefix + name] = tensor.to(torch.bfloat16).contiguous()
            continue
        stem = prefix + name.removesuffix(".weight")
        scale2 = global_scale(*(state[member] for member in _members(name, state)))
        packed, scale = pack(tensor.float(), scale2)
        tensors[f"{stem}.weight"], tensors[f"{stem}.weight_scale"] = (
            packed.contiguous(),
            scale.contiguous(),
        )
        tensors[f"{stem}.weight_scale_2"] = scale2
    out.mkdir(parents=True, exist_ok=True)
    _save(tensors, out / "model.safetensors", {"format": "pt"})


def load_exported(model: nn.Module, prefix: str, folder: Path, *, partly: bool = False) -> None:
    """Load the weights of an exported checkpoint, NVFP4 or BF16, into a model as F32. `partly`: the
    checkpoint has not all of them; the others stay.
    """
    stored = load_file(folder / "model.safetensors")
    state: dict[str, Tensor] = {}
    for name in model.state_dict():
        full = prefix + name
        if partly and full not in stored:
            continue
        stem = full.removesuffix(".weight")
        if f"{stem}.weight_scale" in stored:
            parts = stored[full], stored[f"{stem}.weight_scale"], stored[f"{stem}.weight_scale_2"]
            state[name] = unpack(*parts)
        else:
            state[name] = stored[full].float()
    model.load_state_dict(state, strict=not partly)


def is_quantised(name: str) -> bool:
    """Whether a parameter is stored as NVFP4."""
    return name.endswith(".weight") and name.split(".")[-2] in LINEARS


def write_target_config(
    out: Path, dims: NanoTargetDims, special: dict[str, int], *, quant: bool = True
) -> None:
    """Write config.json, generation_config.json and, with `quant`, hf_quant_config.json of the
    target.
    """
    config = _target_config(dims, special)
    if not quant:
        del config["quantization_config"]
    generation = {
        "bos_token_id": special["<|endoftext|>"],
        "do_sample": True,
        "eos_token_id": [special["<|im_end|>"], special["<|endoftext|>"]],
        "pad_token_id": special["<|endoftext|>"],
        "temperature": 1.0,
        "top_k": 20,
        "top_p": 0.95,
    }
    _write(out / "config.json", config)
    _write(out / "generation_config.json", generation)
    if quant:
        _write(out / "hf_quant_config.json", _hf_quant(config["quantization_config"], "FP8"))


def write_seeing_config(
    out: Path, dims: NanoTargetDims, tower: NanoTowerDims, special: dict[str, int]
) -> None:
    """Write what `write_target_config` writes for a target with a vision tower, and its
    preprocessor_config.json.
    """
    write_target_config(out, dims, special)
    text = _target_config(dims, special)
    quant = text.pop("quantization_config")
    del text["architectures"]
    vision = {
        "model_type": "qwen3_5",
        "depth": tower.depth,
        "hidden_size": tower.hidden,
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": tower.intermediate,
        "num_heads": tower.heads,
        "in_channels": 3,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": FRAMES,
        "num_position_embeddings": tower.positions**2,
        "out_hidden_size": tower.out,
        "deepstack_visual_indexes": [],
        "initializer_range": 0.02,
    }
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
        "image_token_id": special["<|image_pad|>"],
        "video_token_id": special["<|video_pad|>"],
        "vision_start_token_id": special["<|vision_start|>"],
        "vision_end_token_id": special["<|vision_end|>"],
        "text_config": text,
        "vision_config": vision,
        "quantization_config": quant | {"ignore": [*quant["ignore"], "*visual*"]},
    }
    processor = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": tower.shortest, "longest_edge": tower.longest},
        "patch_size": PATCH,
        "temporal_patch_size": FRAMES,
        "merge_size": MERGE,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "resample": 3,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "rescale_factor": 1 / 255,
    }
    _write(out / "config.json", config)
    _write(out / "hf_quant_config.json", _hf_quant(config["quantization_config"], "FP8"))
    _write(out / "preprocessor_config.json", processor)


def _target_config(dims: NanoTargetDims, special: dict[str, int]) -> dict[str, Any]:
    types = [
        "full_attention" if dims.is_full(i) else "linear_attention" for i in range(dims.layers)
    ]
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "vocab_size": dims.vocab,
        "hidden_size": dims.hidden,
        "intermediate_size": dims.intermediate,
        "num_hidden_layers": dims.layers,
        "layer_types": types,
        "full_attention_interval": 4,
        "num_attention_heads": dims.q_heads,
        "num_key_value_heads": dims.kv_heads,
        "head_dim": dims.head_dim,
        "attn_output_gate": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "partial_rotary_factor": dims.rotary / dims.head_dim,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": int(dims.theta),
            "partial_rotary_factor": dims.rotary / dims.head_dim,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
        "linear_num_key_heads": dims.gdn_k_heads,
        "linear_num_value_heads": dims.gdn_v_heads,
        "linear_key_head_dim": dims.gdn_dim,
        "linear_value_head_dim": dims.gdn_dim,
        "linear_conv_kernel_dim": dims.conv,
        "output_gate_type": "swish",
        "mamba_ssm_dtype": "float32",
        "rms_norm_eps": dims.eps,
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
        "initializer_range": 0.02,
        "mtp_num_hidden_layers": 0,
        "use_cache": True,
        "bos_token_id": special["<|endoftext|>"],
        "eos_token_id": special["<|endoftext|>"],
        "pad_token_id": None,
        "quantization_config": _quant_config(
            ["lm_head", "model.embed_tokens", "*in_proj_a", "*in_proj_b", "*conv1d"]
        ),
    }


def write_drafter_config(
    out: Path, dims: NanoDrafterDims, target: NanoTargetDims, mask: int
) -> None:
    """Write config.json and hf_quant_config.json of the drafter."""
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "num_hidden_layers": dims.layers,
        "hidden_size": dims.hidden,
        "intermediate_size": dims.intermediate,
        "layer_types": ["sliding_attention"] * (dims.layers - 1) + ["full_attention"],
        "use_sliding_window": True,
        "sliding_window": dims.window,
        "vocab_size": VOCAB,
        "num_attention_heads": dims.q_heads,
        "num_key_value_heads": dims.kv_heads,
        "head_dim": dims.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": dims.eps,
        "rope_theta": int(dims.theta),
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": int(dims.theta)},
        "attention_dropout": 0.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "block_size": dims.block,
        "num_target_layers": target.layers,
        "dflash_config": {
            "mask_token_id": mask,
            "target_layer_ids": tap_layers(target.layers, dims.taps),
            "block_size": dims.block,
        },
        "quantization_config": _quant_config([]),
    }
    if dims.second:
        config |= _second(config, dims)
    _write(out / "config.json", config)
    _write(out / "hf_quant_config.json", _hf_quant(config["quantization_config"], None))


def _second(config: dict[str, Any], dims: NanoDrafterDims) -> dict[str, Any]:
    """What a DFlash2 drafter's config.json has otherwise."""
    flash = {
        "conv_kernel_size": dims.conv_taps,
        "conv_group_size": dims.conv_group,
        "selector_rank": dims.rank,
        "selector_top_k": dims.top_k,
    }
    return {
        "architectures": ["DFlash2DraftModel"],
        "is_causal": False,
        "layer_types": ["sliding_attention"] * dims.layers,
        "dflash_config": {**config["dflash_config"], **flash},
        "quantization_config": _quant_config(["*kernel_projection", "*hidden_projection"]),
    }


def _members(name: str, state: dict[str, Tensor]) -> list[str]:
    """Return the parameters that share a parameter's global scale, including itself."""
    leaf = name.split(".")[-2]
    group = next((g for g in INPUT_GROUPS if leaf in g), (leaf,))
    named = (name.replace(f".{leaf}.", f".{other}.") for other in group)
    return [member for member in named if member in state]


def _quant_config(ignore: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "modelopt",
        "quant_algo": "W4A16_NVFP4",
        "group_size": 16,
        "ignore": ignore,
    }


def _hf_quant(quant: dict[str, Any], cache: str | None) -> dict[str, Any]:
    return {
        "producer": {"name": "modelopt", "version": "thor-dflash nano export"},
        "quantization": {
            "quant_algo": quant["quant_algo"],
            "kv_cache_quant_algo": cache,
            "group_size": quant["group_size"],
            "exclude_modules": quant["ignore"],
        },
    }


def _write(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n")
