"""Errors in a target's config or tensors name the key or tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.checkpoints import (
    ABSENT,
    Dialect,
    TargetGeometry,
    change_tensors,
    edit,
    write_target,
)

from thor_dflash.builders.checkpoint.target import read_target
from thor_dflash.core.errors import CheckpointError

Tensors = dict[str, Any]
SMALL = TargetGeometry()
MLP, QKV, Q = (
    "model.layers.0.mlp.up_proj",
    "model.layers.0.linear_attn.in_proj_qkv",
    "model.layers.3.self_attn.q_proj",
)
FP8 = ml_dtypes.float8_e4m3fn


def refused(directory: Path, part: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_target(directory)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


REQUIRED = "vocab_size rms_norm_eps hidden_act tie_word_embeddings rope_parameters.rope_theta"


@pytest.mark.parametrize("key", REQUIRED.split(" "))
def test_a_key_that_is_missing_or_of_another_type_is_named(key: str, tmp_path: Path) -> None:
    write_target(tmp_path, SMALL, 0)
    for value in ({"a": 1}, "x", ABSENT):
        edit(tmp_path, (key, value))
        refused(tmp_path, f"config.json: {key} must be ")


CONFIG: list[tuple[str, object]] = [
    *(("hidden_size", value) for value in (True, 64.0, 0)),
    *(("rms_norm_eps", value) for value in (0, float("nan"), float("inf"), 10**400, True)),
    ("hidden_act", "gelu"),
    ("attention_bias", True),
    ("attn_output_gate", False),
    ("num_experts", 512),
    ("model_type", "qwen3_next"),
    ("architectures", ["Qwen3_5MoeForCausalLM"]),
    ("layer_types", ["mamba"] * 4),
    ("rope_parameters.rope_type", "yarn"),
    ("rope_parameters.partial_rotary_factor", 3 / 64),
]
OTHER: list[tuple[str, object, str]] = [
    # the error names another key than the one that was changed
    ("model_type", "qwen3_5", "text_config must be"),
    ("num_attention_heads", 3, f"{Q}.weight must be"),
    ("layer_types", ["linear_attention"], "num_hidden_layers must be"),
    ("rope_theta", 1e6, "rope_parameters.rope_theta must be"),
]


@pytest.mark.parametrize(
    ("key", "value", "part"), [*((k, v, f"json: {k} must be ") for k, v in CONFIG), *OTHER]
)
def test_a_config_that_is_not_understood_is_refused(
    key: str, value: object, part: str, tmp_path: Path
) -> None:
    refused(edit(write_target(tmp_path, SMALL, 0), (key, value)), part)


@pytest.mark.parametrize("text", ["", "{", "[1]", "{}", '{"model_type": "a", "model_type": "b"}'])
def test_a_config_that_is_no_object_is_refused(text: str, tmp_path: Path) -> None:
    write_target(tmp_path, SMALL, 0)
    (tmp_path / "config.json").write_text(text)
    refused(tmp_path, "config.json")


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
EXTRA = (
    "x.y", f"{Q}.bias", "model.layers.4.mlp.up_proj.weight", "model.layers.0.self_attn.k_scale",
    f"language_{EMBED}", f"{MLP}.weight_scale", f"{MLP}.weight_scale_inv", f"{MLP}.qweight",
    f"{MLP}.pre_quant_scale", f"{MLP}.weight.absmax",
)  # fmt: skip
"""Tensors that an unquantised checkpoint does not have: those of other models or formats."""
TENSORS: list[tuple[Dialect, Callable[[Tensors], None], str]] = [
    *(("bf16", put(name, ONE), f"{name} must be absent") for name in EXTRA),
    ("bf16", drop(A_LOG), f"{A_LOG} must be "),
    ("bf16", put(A_LOG, np.zeros(2, "i4")), f"{A_LOG} must be "),
    ("bf16", drop(f"{Q}.weight"), f"{Q}.weight [512, 64] must be "),
    ("bf16", put(KV[0], ONE), "must come together"),
    ("modelopt", drop(f"{MLP}.weight_scale"), f"{MLP}.weight_scale must be "),
    ("modelopt", put(f"{MLP}.weight_scale_2", [ONE, ONE]), f"{MLP}.weight_scale_2 must be "),
    ("modelopt", put(f"{MLP}.weight_scale", np.ones((96, 2), FP8)), f"{MLP}.weight_scale must"),
    ("compressed-tensors", drop(f"{MLP}.weight_global_scale"), "weight_global_scale must be "),
    ("compressed-tensors", put(f"{MLP}.weight_zero_point", ONE), "weight_zero_point must be abs"),
    ("fp8", drop(f"{Q}.weight_scale"), f"{Q}.weight_scale must be "),
    ("fp8", put(f"{Q}.weight_scale", np.ones((4, 2), "f4")), f"{Q}.weight_scale must be "),
]


@pytest.mark.parametrize(("dialect", "change", "part"), TENSORS)
def test_a_tensor_that_does_not_fit_is_named(
    dialect: Dialect, change: Callable[[Tensors], None], part: str, tmp_path: Path
) -> None:
    change_tensors(write_target(tmp_path, SMALL, 0, dialect), change)
    refused(tmp_path, part)


SCALES: list[tuple[Dialect, str, object]] = [
    *(("modelopt", "weight_scale_2", value) for value in (0.0, -1.0, np.nan, np.inf)),
    *(("compressed-tensors", "weight_global_scale", value) for value in (0.0, 1e-45, np.inf)),
    ("fp8", "weight_scale", np.nan),
    *(("modelopt", "weight_scale", bits) for bits in (0x7F, 0xFF, 0xB8)),
]


@pytest.mark.parametrize(("dialect", "part", "value"), SCALES)
def test_a_scale_that_is_no_scale_is_named(
    dialect: Dialect, part: str, value: Any, tmp_path: Path
) -> None:
    name = f"{MLP}.{part}"

    def spoil(tensors: Tensors) -> None:
        scale = tensors[name].copy()
        flat = scale.view(np.uint8) if isinstance(value, int) else scale
        flat.reshape(-1)[-1] = value
        tensors[name] = scale

    change_tensors(write_target(tmp_path, SMALL, 0, dialect), spoil)
    checkpoint = read_target(tmp_path)
    checkpoint.matrix(QKV.removeprefix("model."))
    with pytest.raises(CheckpointError) as caught:
        checkpoint.matrix(MLP.removeprefix("model."))
    assert str(caught.value).startswith(f"{tmp_path / 'model.safetensors'}: {name}")
