"""Errors in a target's config or tensors: the message names the key or tensor, the rule and what
was found.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.checkpoints import (
    GEOMETRIES,
    Dialect,
    TargetGeometry,
    read_config,
    read_safetensors,
    write_config,
    write_safetensors,
    write_target,
)

from thor_dflash.builders.checkpoint.json_fields import LONGEST_VALUE, shown
from thor_dflash.builders.checkpoint.target import read_target
from thor_dflash.core.errors import CheckpointError

Tensors = dict[str, Any]
SMALL = TargetGeometry()
ABSENT = object()
MLP, QKV, Q = (
    "model.layers.0.mlp.up_proj",
    "model.layers.0.linear_attn.in_proj_qkv",
    "model.layers.3.self_attn.q_proj",
)
FP8 = ml_dtypes.float8_e4m3fn


def refused(directory: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read_target(directory)
    assert "\n" not in str(caught.value)


def edit(directory: Path, key: str, value: object) -> None:
    """Replaces the value of a dotted key of config.json; removes the key if `value` is ABSENT."""
    config = read_config(directory)
    *path, last = key.split(".")
    inner = config
    for part in path:
        inner = inner[part]
    if value is ABSENT:
        del inner[last]
    else:
        inner[last] = value
    write_config(directory, config)


REQUIRED = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads"
    " num_key_value_heads head_dim linear_num_key_heads linear_num_value_heads"
    " linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim max_position_embeddings"
    " rms_norm_eps hidden_act tie_word_embeddings model_type rope_parameters.rope_theta"
    " rope_parameters.partial_rotary_factor"
)


@pytest.mark.parametrize("key", REQUIRED.split(" "))
@pytest.mark.parametrize("value", [ABSENT, None, "x", [], {"a": 1}])
def test_a_key_that_is_missing_or_of_another_type_is_named(
    key: str, value: object, tmp_path: Path
) -> None:
    write_target(tmp_path, SMALL, 0)
    edit(tmp_path, key, value)
    refused(tmp_path, rf"config\.json: {key} must be .* \(got ")


CONFIG: list[tuple[str, object, str]] = [
    ("hidden_size", True, r"hidden_size must be an integer of at least 1 \(got True\)"),
    ("hidden_size", 64.0, r"hidden_size must be an integer of at least 1 \(got 64\.0\)"),
    ("hidden_size", 0, r"hidden_size must be an integer of at least 1 \(got 0\)"),
    ("max_position_embeddings", 1 << 63, r"max_position_embeddings must be an integer of 64 bits"),
    ("rms_norm_eps", 0, r"rms_norm_eps must be a positive finite number \(got 0\)"),
    ("rms_norm_eps", float("nan"), r"rms_norm_eps must be a positive finite number \(got nan\)"),
    ("rms_norm_eps", float("inf"), r"rms_norm_eps must be a positive finite number \(got inf\)"),
    ("rms_norm_eps", 10**400, r"rms_norm_eps must be a positive finite number \(got 1000"),
    ("rms_norm_eps", True, r"rms_norm_eps must be a number \(got True\)"),
    ("linear_conv_kernel_dim", 1, r"linear_conv_kernel_dim must be an integer of at least 2"),
    ("hidden_act", "gelu", r"hidden_act must be silu \(got 'gelu'\)"),
    ("attention_bias", True, r"attention_bias must be absent or false \(got True\)"),
    ("attention_bias", 0, r"attention_bias must be absent or false \(got 0\)"),
    ("attn_output_gate", False, r"attn_output_gate must be absent or true \(got False\)"),
    ("output_gate_type", "sigmoid", r"output_gate_type must be absent or .swish. or .silu. \(got"),
    ("num_experts", 512, r"num_experts must be absent or 0 \(got 512\)"),
    ("model_type", "qwen3_5_moe", r"model_type must be qwen3_5 or qwen3_5_text \(got 'qwen3_5_moe"),
    ("model_type", "qwen3_next", r"model_type must be qwen3_5 or .* \(got 'qwen3_next'\)"),
    ("model_type", "qwen3_5", r"text_config must be an object \(got nothing\)"),
    (
        "architectures",
        ["Qwen3_5MoeForCausalLM"],
        r"architectures must be a list of Qwen3_5For.*Moe",
    ),
    ("architectures", "Qwen3_5ForCausalLM", r"architectures must be a list of"),
    ("num_attention_heads", 3, r"q_proj\.weight must be .* \[384, 64\] \(got bfl"),
    ("num_key_value_heads", 3, r"num_attention_heads must be a multiple of 3 key/value heads"),
    ("linear_num_key_heads", 4, r"linear_num_value_heads must be a multiple of 4 key heads"),
    ("layer_types", [["linear_attention"]] * 4, r"layer_types must be a list of linear_att"),
    ("layer_types", ["linear_attention"], r"num_hidden_layers must be 1, one per entry of layer_t"),
    ("layer_types", ["mamba"] * 4, r"layer_types must be a list of linear_attention \| full_atten"),
    ("layer_types", [3] * 4, r"layer_types must be a list of"),
    ("rope_parameters.rope_type", "yarn", r"rope_parameters\.rope_type must be .*\(got 'yarn'\)"),
    (
        "rope_parameters.rope_type",
        "linear",
        r"rope_type must be absent or \"default\" \(got 'linea",
    ),
    ("rope_parameters.type", "dynamic", r"rope_parameters\.type must be .*\(got 'dynamic'\)"),
    ("rope_scaling", {"type": "yarn", "factor": 4}, r"rope_scaling\.type must be .*\(got 'yarn'\)"),
    ("rope_theta", 1e6, r"rope_parameters\.rope_theta must be 1000000\.0 as in .*rope_theta \(got"),
    ("rope_parameters.partial_rotary_factor", 0.3, r"rope_p\w+\.partial_\w+ must .*got 0\.3\)"),
    ("rope_parameters.partial_rotary_factor", 2, r"partial_rotary_factor must be a share that"),
    ("rope_parameters.partial_rotary_factor", 3 / 64, r"partial_rotary_factor must be a share"),
    ("rope_parameters", {"full_attention": {"rope_theta": 1}}, r"must be one rope for all"),
]


@pytest.mark.parametrize(("key", "value", "message"), CONFIG)
def test_a_config_that_is_not_understood_is_named(
    key: str, value: object, message: str, tmp_path: Path
) -> None:
    write_target(tmp_path, SMALL, 0)
    edit(tmp_path, key, value)
    refused(tmp_path, message)


def test_layers_must_be_given_somehow(tmp_path: Path) -> None:
    write_target(tmp_path, replace(SMALL, flat_rope=True), 0)
    edit(tmp_path, "full_attention_interval", ABSENT)
    refused(tmp_path, r"layer_types must be given where full_attention_interval is not")


def test_more_layers_than_any_model_has_are_refused_before_they_are_listed(tmp_path: Path) -> None:
    write_target(tmp_path, SMALL, 0)
    edit(tmp_path, "layer_types", ABSENT)
    edit(tmp_path, "full_attention_interval", 4)
    edit(tmp_path, "num_hidden_layers", 1025)
    refused(tmp_path, r"num_hidden_layers must be an integer of at most 1024 \(got 1025\)")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("text_config.hidden_size", ABSENT, r"json: text_config\.hidden_size must be an integer"),
        (
            "text_config.model_type",
            "llama",
            r"text_config\.model_type must be absent or .qwen3_5_t",
        ),
        (
            "text_config.tie_word_embeddings",
            True,
            r"tie_word_embeddings must be false as at the to",
        ),
        ("text_config", 3, r"text_config must be an object \(got 3\)"),
    ],
)
def test_a_key_of_the_wrapper_is_named_with_its_path(
    key: str, value: object, message: str, tmp_path: Path
) -> None:
    write_target(tmp_path, GEOMETRIES["27b"], 0)
    edit(tmp_path, key, value)
    refused(tmp_path, message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"config\.json must be a file \(got nothing there\)"),
        ("{", r"config\.json must be JSON \(got "),
        ("", r"config\.json must be JSON \(got "),
        ("[1]", r"config\.json must be a JSON object \(got list\)"),
        ("null", r"config\.json must be a JSON object \(got NoneType\)"),
        ("{}", r"config\.json: model_type must be a string \(got nothing\)"),
        ('{"model_type": "a", "model_type": "b"}', r"must be JSON \(got .*'model_type' twice"),
    ],
)
def test_a_config_that_is_no_object_is_named(
    text: str | None, message: str, tmp_path: Path
) -> None:
    write_target(tmp_path, SMALL, 0)
    (tmp_path / "config.json").unlink()
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    refused(tmp_path, message)


def test_a_directory_that_is_none_is_named(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", r"nowhere must be a checkpoint directory \(got nothing there\)")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", r"file must be a checkpoint directory \(got a file\)")
    (tmp_path / "config.json").mkdir()
    refused(tmp_path, r"config\.json must be a file \(got a directory\)")


def put(name: str, value: object) -> Callable[[Tensors], None]:
    return lambda t: t.update({name: np.asarray(value)})


def drop(name: str) -> Callable[[Tensors], None]:
    return lambda t: t.pop(name)


def recast(name: str, dtype: object) -> Callable[[Tensors], None]:
    return lambda t: t.update({name: t[name].astype(dtype)})


def reshape(name: str, *shape: int) -> Callable[[Tensors], None]:
    return lambda t: t.update({name: t[name].reshape(shape)})


def put_both_kv(tensors: Tensors) -> None:
    """KV cache scales of two numbers each, as if there was one for each of two heads."""
    tensors.update({name: np.ones(2, np.float32) for name in KV})


A_LOG = "model.layers.0.linear_attn.A_log"
CONV = "model.layers.0.linear_attn.conv1d.weight"
EMBED = "model.embed_tokens.weight"
ONE = np.ones(1, np.float32)
KV = ("model.layers.3.self_attn.k_scale", "model.layers.3.self_attn.v_scale")
LAYOUT: list[tuple[Dialect, Callable[[Tensors], None], str]] = [
    ("bf16", drop(A_LOG), rf"^[^(]*: {A_LOG} must be bfloat16 \| .* \[2\] \(got nothing\)"),
    ("bf16", put(A_LOG, np.zeros(3, "f4")), rf"{A_LOG} must be .* \[2\] \(got float32\[3\]\)"),
    ("bf16", put(A_LOG, np.zeros(2, "i4")), rf"{A_LOG} must be .* \[2\] \(got int32\[2\]\)"),
    ("bf16", reshape(CONV, 192, 4, 1), rf"{CONV} must be .* \[192, 1, 4\] \(got .*\[192, 4, 1\]"),
    ("bf16", drop(f"{Q}.weight"), rf"{Q}\.weight \[512, 64\] must be .*got nothing"),
    ("bf16", reshape(f"{Q}.weight", 64, 512), rf"{Q}\.weight must be .*\[512, 64\] \(got bfloat16"),
    ("bf16", drop("lm_head.weight"), r"lm_head\.weight \[256, 64\] must be .*got nothing"),
    ("bf16", put(f"{Q}.bias", ONE), rf"{Q}\.bias must be absent, no such tensor belongs to this"),
    ("bf16", put("x.y", ONE), r"x\.y must be absent"),
    ("bf16", put("model.layers.4.mlp.up_proj.weight", ONE), r"layers\.4\.mlp.* must be absent"),
    ("bf16", put(f"{MLP}.weight_scale", ONE), rf"{MLP}\.weight_scale must be absent"),
    ("bf16", put(f"language_{EMBED}", ONE), r"language_model\.embed.* must be absent"),
    ("bf16", drop(EMBED), r"must hold model\.language_model\.embed.* or .*\(got none of them\)"),
    (
        "bf16",
        put("model.language_model.embed_tokens.weight", ONE),
        r"\(got model.*\. and model\.\)",
    ),
    (
        "bf16",
        put("model.layers.3.self_attn.k_scale", ONE),
        r"k_scale and .*v_scale must come toget",
    ),
    ("bf16", put_both_kv, r"k_scale must be one number \(got float32\[2\]\)"),
    ("bf16", put("model.layers.0.self_attn.k_scale", ONE), r"layers\.0.*k_scale must be absent"),
    ("bf16", recast(f"{MLP}.weight", "i1"), rf"{MLP}\.weight must be .* \(got int8\[96, 64\]\)"),
    (
        "bf16",
        put(f"{MLP}.weight", np.zeros((96, 32), "u1")),
        rf"{MLP}\.weight_scale must be in the",
    ),
    ("bf16", put(f"{MLP}.weight_scale_inv", ONE), r"FP8 with 128x128 block scales: .*_scale_inv"),
    ("bf16", put(f"{MLP}.qweight", ONE), rf"{MLP} must be NVFP4, .* \(got GPTQ or AWQ: .*qweight"),
    ("bf16", put(f"{MLP}.pre_quant_scale", ONE), r"\(got AWQ \(pre_quant_scale\)"),
    ("bf16", put(f"{MLP}.weight_shape", ONE), r"\(got packed integers: "),
    ("bf16", put(f"{MLP}.SCB", ONE), r"\(got bitsandbytes 8-bit integers: "),
    ("bf16", put(f"{MLP}.weight.absmax", ONE), r"\(got bitsandbytes 4-bit: .*weight\.absmax"),
    ("modelopt", drop(f"{MLP}.weight_scale"), rf"{MLP}\.weight_scale must be in the"),
    ("modelopt", drop(f"{MLP}.weight_scale_2"), rf"{MLP}\.weight_scale_2 must be in the"),
    (
        "modelopt",
        put(f"{MLP}.weight_scale_2", [ONE, ONE]),
        r"scale_2 must be float32 \[\] \| \[1\]",
    ),
    ("modelopt", recast(f"{MLP}.weight_scale_2", "f2"), r"must be float32 .* \(got float16\[\]\)"),
    (
        "modelopt",
        recast(f"{MLP}.weight_scale", "u1"),
        r"_scale must be float8_e4m3fn \[96, 4\] \(got",
    ),
    ("modelopt", put(f"{MLP}.weight_scale", np.ones((96, 2), FP8)), r"group size of 16 \(got 32\)"),
    ("modelopt", put(f"{MLP}.weight_scale", np.ones((96, 8), FP8)), r"group size of 16 \(got 8\)"),
    ("modelopt", put(f"{MLP}.weight_scale", np.ones((96, 3), FP8)), r"\[96, 4\] .*\[96, 3\]\)"),
    ("modelopt", put(f"{MLP}.weight_scale", np.ones((48, 8), FP8)), r"group size of 16 \(got 8\)"),
    (
        "modelopt",
        put(f"{MLP}.weight_scale", np.ones((48, 4), FP8)),
        r"must be .*\[96, 4\] \(got flo",
    ),
    ("modelopt", put(f"{MLP}.weight", np.zeros((96, 64), "u1")), r"must be uint8 \[96, 32\] \(got"),
    ("compressed-tensors", recast(f"{MLP}.weight_packed", "i4"), r"uint8 \[96, 32\] \(got int32\["),
    (
        "compressed-tensors",
        drop(f"{MLP}.weight_global_scale"),
        r"weight_global_scale must be in the",
    ),
    ("compressed-tensors", put(f"{MLP}.weight", ONE), rf"{MLP}\.weight must be absent"),
    ("compressed-tensors", put(f"{MLP}.weight_zero_point", ONE), r"\(got asymmetric integers: "),
    ("fp8", drop(f"{Q}.weight_scale"), rf"{Q}\.weight_scale must be in the checkpoint"),
    ("fp8", put(f"{Q}.weight_scale", np.ones(3, "f4")), r"_scale must be .* \(got float32\[3\]\)"),
    ("fp8", put(f"{Q}.weight_scale", np.ones((4, 2), "f4")), r"FP8 with block scales \[4, 2\]"),
]


@pytest.mark.parametrize(("dialect", "change", "message"), LAYOUT)
def test_a_tensor_that_does_not_fit_is_named(
    dialect: Dialect, change: Callable[[Tensors], None], message: str, tmp_path: Path
) -> None:
    write_target(tmp_path, SMALL, 0, dialect)
    tensors = read_safetensors(tmp_path / "model.safetensors")
    change(tensors)
    write_safetensors(tmp_path / "model.safetensors", tensors)
    refused(tmp_path, message)


def test_columns_must_come_in_groups_of_sixteen(tmp_path: Path) -> None:
    write_target(tmp_path, replace(SMALL, intermediate=112), 0, "modelopt")
    tensors = read_safetensors(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = tensors[name][:, :52]
    write_safetensors(tmp_path / "model.safetensors", tensors)
    edit(tmp_path, "intermediate_size", 104)
    refused(tmp_path, rf"{name} must have a multiple of 16 columns, as NVFP4 \(got 104\)")


def test_many_misfits_are_counted_and_a_few_named(tmp_path: Path) -> None:
    write_target(tmp_path, SMALL, 0)
    edit(tmp_path, "hidden_size", 80)
    refused(
        tmp_path, r"must hold the tensors of its config \(got \d\d misfits: .*; and \d\d more\)$"
    )
    with pytest.raises(CheckpointError) as caught:
        read_target(tmp_path)
    assert str(caught.value).count(" must be ") == 4
    counts = re.search(r"got (\d+) misfits: .*; and (\d+) more", str(caught.value))
    assert counts
    assert int(counts[1]) == 4 + int(counts[2])


def test_a_value_is_told_whole_or_cut_to_as_much() -> None:
    assert shown("x" * (LONGEST_VALUE - 2)) == repr("x" * (LONGEST_VALUE - 2))
    cut = shown("x" * (LONGEST_VALUE - 1))
    assert (len(cut), cut[-4:]) == (LONGEST_VALUE, "x...")


SCALES: list[tuple[Dialect, str, object, str]] = [
    (
        "modelopt",
        f"{MLP}.weight_scale_2",
        0.0,
        r"up_proj\.weight_scale_2 must be a positive finite",
    ),
    ("modelopt", f"{MLP}.weight_scale_2", -1.0, r"must be a positive finite number \(got -1\.0\)"),
    ("modelopt", f"{MLP}.weight_scale_2", np.nan, r"must be a positive finite number \(got nan\)"),
    ("modelopt", f"{MLP}.weight_scale_2", np.inf, r"must be a positive finite number \(got inf\)"),
    ("compressed-tensors", f"{MLP}.weight_global_scale", 0.0, r"must be a positive finite number"),
    (
        "compressed-tensors",
        f"{MLP}.weight_global_scale",
        1e-45,
        r"_global_scale, as a divisor, must be a pos",
    ),
    (
        "compressed-tensors",
        f"{MLP}.weight_global_scale",
        np.inf,
        r"must be a positive finite number",
    ),
    (
        "fp8",
        f"{MLP}.weight_scale",
        np.nan,
        r"up_proj\.weight_scale must be a positive finite numbe",
    ),
    ("modelopt", f"{MLP}.weight_scale", 0x7F, r"at least 0 \(got nan at row 95, group 3\)"),
    ("modelopt", f"{MLP}.weight_scale", 0xFF, r"at least 0 \(got nan at row 95, group 3\)"),
    ("modelopt", f"{MLP}.weight_scale", 0xB8, r"at least 0 \(got -1\.0 at row 95, group 3\)"),
]


@pytest.mark.parametrize(("dialect", "name", "value", "message"), SCALES)
def test_a_scale_that_is_no_scale_is_named(
    dialect: Dialect, name: str, value: Any, message: str, tmp_path: Path
) -> None:
    write_target(tmp_path, SMALL, 0, dialect)
    tensors = read_safetensors(tmp_path / "model.safetensors")
    scale = tensors[name].copy()
    flat = scale.view(np.uint8) if isinstance(value, int) else scale
    flat.reshape(-1)[-1] = value
    tensors[name] = scale
    write_safetensors(tmp_path / "model.safetensors", tensors)
    checkpoint = read_target(tmp_path)
    assert checkpoint.matrix(QKV.removeprefix("model.")).rows > 0
    with pytest.raises(CheckpointError, match=message) as caught:
        checkpoint.matrix(MLP.removeprefix("model."))
    assert str(caught.value).startswith(f"{tmp_path / 'model.safetensors'}: {name}")
