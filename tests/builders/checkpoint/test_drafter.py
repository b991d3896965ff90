"""A DFlash drafter's checkpoint reads back as it was written; a drafter of another kind is refused
with the name of what it has and DFlash has not.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import (
    DIALECTS,
    GEOMETRIES,
    Dialect,
    DrafterGeometry,
    TargetGeometry,
    dequantised,
    read_config,
    read_safetensors,
    write_config,
    write_drafter,
    write_safetensors,
    write_target,
)

from thor_dflash.builders.checkpoint.drafter import (
    DrafterCheckpoint,
    check_pair,
    drafter_layout,
    read_drafter,
)
from thor_dflash.builders.checkpoint.target import read_target
from thor_dflash.core.errors import CheckpointError
from thor_dflash.core.model_dims import AttentionDims, DrafterDims, DraftLayerDims

TARGET = TargetGeometry()
DRAFTER = DrafterGeometry()
ABSENT = object()
CAUSAL = DraftLayerDims(causal=True, window=32)
OPEN = DraftLayerDims(causal=False, window=0)


def write(directory: Path, *changes: tuple[str, object]) -> Path:
    """Writes a drafter whose config has these dotted keys replaced, or removed if ABSENT."""
    write_drafter(directory, TARGET, DRAFTER, 0)
    config = read_config(directory)
    for key, value in changes:
        *path, last = key.split(".")
        inner: dict[str, Any] = config
        for part in path:
            inner = inner[part]
        inner[last] = value
        if value is ABSENT:
            del inner[last]
    write_config(directory, config)
    return directory


def refused(directory: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read_drafter(directory)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_weight_comes_back(dialect: Dialect, tmp_path: Path) -> None:
    checkpoint = read_drafter(write_drafter(tmp_path, TARGET, DRAFTER, 3, dialect))
    expected = dequantised(tmp_path)
    layout = drafter_layout(checkpoint.dims)
    for name, shape in layout.matrices.items():
        matrix = checkpoint.matrix(name)
        assert (matrix.name, matrix.rows, matrix.columns) == (name, *shape)
        np.testing.assert_array_equal(matrix.dequantise(), expected.pop(f"{name}.weight"))
    for name in layout.tensors:
        values = checkpoint.tensor(name).astype(np.float32)
        np.testing.assert_array_equal(values, expected.pop(name))
    assert not expected


def test_sizes_come_from_the_config(tmp_path: Path) -> None:
    checkpoint = read_drafter(write(tmp_path))
    assert checkpoint.dims == DrafterDims(
        vocab=256,
        hidden=64,
        intermediate=96,
        layers=(CAUSAL, OPEN),
        attention=AttentionDims(heads=4, kv_heads=2, head_dim=32, rotary_dim=32, rope_theta=1e7),
        eps=1e-6,
        block=16,
        taps=(0, 1, 3),
        mask_token=250,
        target_layers=4,
        max_position=4096,
    )
    assert checkpoint.directory == tmp_path


def test_the_layout_of_the_27b_has_58_tensors() -> None:
    dims = DrafterDims(
        vocab=248320,
        hidden=5120,
        intermediate=17408,
        layers=(CAUSAL,) * 4 + (OPEN,),
        attention=AttentionDims(heads=32, kv_heads=8, head_dim=128, rotary_dim=128, rope_theta=1e7),
        eps=1e-6,
        block=16,
        taps=(1, 16, 31, 46, 61),
        mask_token=248070,
        target_layers=64,
        max_position=262144,
    )
    layout = drafter_layout(dims)
    shapes = [*layout.matrices.values(), *layout.tensors.values()]
    assert len(shapes) == 58
    assert sum(int(np.prod(shape)) for shape in shapes) == 1_730_213_120


Changes = list[tuple[str, object]]
SAME: list[Changes] = [
    [("dflash_config.block_size", ABSENT), ("block_size", 16)],
    [("block_size", 16)],
    [("dflash_config.mask_token_id", ABSENT), ("mask_token_id", 250)],
    [("dflash_config.target_layer_ids", ABSENT), ("target_layer_ids", [0, 1, 3])],
    [("num_target_layers", ABSENT), ("dflash_config.num_target_layers", 4)],
    [("rope_theta", ABSENT), ("rope_parameters", {"rope_theta": 1e7, "rope_type": "default"})],
    [("rope_scaling", {"type": "default"})],
    [("is_causal", [True, False])],
    [("dflash_config.causal", [True, False])],
    [("is_causal", None), ("dflash_config.causal", None)],
    [("architectures", ABSENT)],
    [("sample_from_anchor", False), ("is_neox_style", True), ("output_multiplier", 1)],
    [("attention_value_scale", 1), ("input_embedding_scale", 1), ("mlp_bias", False)],
    [("has_own_lm_head", False), ("has_own_embed_tokens", False), ("lilicorr_enabled", False)],
    [("attention_sink_bias", None), ("final_logit_softcapping", None), ("markov_rank", None)],
    [("quantization_config", {"quant_method": "modelopt"}), ("auto_map", {"AutoModel": "dflash"})],
    [("partial_rotary_factor", 1.0)],
]


@pytest.mark.parametrize("changes", SAME)
def test_other_spellings_mean_the_same(changes: Changes, tmp_path: Path) -> None:
    plain = read_drafter(write(tmp_path / "a")).dims
    assert read_drafter(write(tmp_path / "b", *changes)).dims == plain


FULL_WINDOW = DraftLayerDims(causal=False, window=32)
FULL_CAUSAL = DraftLayerDims(causal=True, window=0)
VISIBLE: list[tuple[Changes, tuple[DraftLayerDims, ...]]] = [
    ([("layer_types", ABSENT), ("use_sliding_window", False)], (OPEN, OPEN)),
    ([("layer_types", ["full_attention"] * 2)], (OPEN, OPEN)),
    ([("layer_types", ["full_attention", "sliding_attention"])], (OPEN, CAUSAL)),
    ([("is_causal", True)], (CAUSAL, FULL_CAUSAL)),
    ([("is_causal", False)], (FULL_WINDOW, OPEN)),
    ([("dflash_config.causal", False)], (FULL_WINDOW, OPEN)),
    ([("is_causal", [False, True])], (FULL_WINDOW, FULL_CAUSAL)),
    ([("sliding_window", 16)], (DraftLayerDims(causal=True, window=16), OPEN)),
    ([("sliding_window", 2**31)], (DraftLayerDims(causal=True, window=2**30), OPEN)),
]


@pytest.mark.parametrize(("changes", "layers"), VISIBLE)
def test_what_each_layer_sees(
    changes: Changes, layers: tuple[DraftLayerDims, ...], tmp_path: Path
) -> None:
    assert read_drafter(write(tmp_path, *changes)).dims.layers == layers


def test_a_head_size_that_is_not_given_is_the_hidden_size_over_the_heads(tmp_path: Path) -> None:
    write_drafter(tmp_path, TARGET, replace(DRAFTER, head_dim=16), 0)
    config = read_config(tmp_path)
    write_config(tmp_path, {k: v for k, v in config.items() if k != "head_dim"})
    assert read_drafter(tmp_path).dims.attention.head_dim == 16


def test_the_depth_of_the_target_may_be_left_out(tmp_path: Path) -> None:
    dims = read_drafter(write(tmp_path, ("num_target_layers", ABSENT))).dims
    assert dims.target_layers == 0
    check_pair(read_target(write_target(tmp_path / "t", TARGET, 0)).dims, dims)


REQUIRED = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads"
    " num_key_value_heads rms_norm_eps max_position_embeddings hidden_act model_type rope_theta"
)


@pytest.mark.parametrize("key", REQUIRED.split(" "))
@pytest.mark.parametrize("value", [ABSENT, [], "x"])
def test_a_key_that_is_missing_or_of_another_type_is_named(
    key: str, value: object, tmp_path: Path
) -> None:
    refused(write(tmp_path, (key, value)), rf"config\.json: {key} must be .* \(got ")


REFUSED: list[tuple[str, object, str]] = [
    ("architectures", ["DFlash2DraftModel"], r"architectures must be a list of DFlashDraftModel"),
    ("architectures", ["Qwen3DSparkModel"], r"architectures must be .*\(got \['Qwen3DSparkModel'"),
    ("model_type", "llama", r"model_type must be qwen3 \(got 'llama'\)"),
    ("hidden_act", "gelu", r"hidden_act must be silu \(got 'gelu'\)"),
    ("attention_bias", True, r"attention_bias must be absent or false \(got True\)"),
    ("mlp_bias", True, r"mlp_bias must be absent or false"),
    ("dflash_config.conv_kernel_size", 2, r"conv_kernel_size must be absent, .* DFlash2 is not"),
    ("dflash_config.selector_rank", 256, r"selector_rank must be absent, .* DFlash2 is not sup"),
    ("dflash2_config", {}, r"dflash2_config must be absent, DFlash2 is not supported"),
    ("sample_from_anchor", True, r"sample_from_anchor must be absent or false \(got True\)"),
    ("dflash_config.sample_from_anchor", True, r"dflash_config\.sample_from_anchor must be absent"),
    ("markov_rank", 256, r"markov_rank must be absent, the Markov head of DSpark is not supported"),
    ("enable_confidence_head", True, r"the confidence head of DSpark is not supported"),
    ("num_anchors", 512, r"num_anchors must be absent, the anchors of DSpark"),
    ("dspark_config", {}, r"dspark_config must be absent, DSpark is not supported"),
    ("domino_rank", 64, r"domino_rank must be absent, Domino is not supported"),
    ("dflash_config.lilicorr_candidate_topk", 16, r"lilicorr_candidate_topk .* LiLiCorr is not"),
    ("lilicorr_enabled", True, r"lilicorr_enabled must be absent or false"),
    ("xpress_num_passes", 6, r"xpress_num_passes must be absent, XPress is not supported"),
    ("attention_sink_bias", True, r"attention_sink_bias must be absent or false"),
    ("attention_value_scale", 0.7, r"attention_value_scale must be absent or 1\.0"),
    ("input_embedding_scale", 8, r"input_embedding_scale must be absent or 1\.0 or 1 \(got 8\)"),
    ("output_multiplier", 0.5, r"output_multiplier must be absent or 1\.0"),
    ("final_logit_softcapping", 30.0, r"final_logit_softcapping must be absent \(got 30\.0\)"),
    ("is_neox_style", False, r"is_neox_style must be absent or true \(got False\)"),
    ("has_own_lm_head", True, r"has_own_lm_head must be absent or false"),
    ("draft_vocab_size", 64, r"draft_vocab_size must be absent, a reduced draft vocabulary"),
    ("speculators_model_type", "dflash", r"the speculators packaging is not supported"),
    ("dflash_config.use_swa", True, r"use_swa must be absent, a window outside layer_types"),
    ("dflash_config.novel", 1, r"dflash_config\.novel must be absent, this key is not supported"),
    ("novel", 1, r"json: novel must be absent, this key is not supported \(got 1\)"),
    ("dflash_config.sliding_window", 32, r"dflash_config\.sliding_window must be absent, this key"),
    ("dflash_config.rope_theta", 1e6, r"dflash_config\.rope_theta must be absent, this key is not"),
    ("dflash_config.layer_types", ["full_attention"], r"dflash_config\.layer_types must be absent"),
    ("dflash_config", 3, r"dflash_config must be an object \(got 3\)"),
    ("partial_rotary_factor", 0.5, r"partial_rotary_factor must be absent or 1\.0"),
    (
        "rope_parameters",
        {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
        r"rope_parameters\.partial_rotary_factor must be absent or 1\.0 or 1 \(got 0\.25\)",
    ),
    ("rope_scaling", {"partial_rotary_factor": 0.5}, r"rope_scaling\.partial_rotary_factor must"),
    ("rope_parameters", {"full_attention": {"rope_type": "yarn"}}, r"must be one rope for all"),
    ("rope_scaling", {"rope_type": "yarn"}, r"rope_scaling\.rope_type must be .*\(got 'yarn'\)"),
    ("block_size", 8, r"block_size must be 16 as in dflash_config \(got 8\)"),
    ("dflash_config.block_size", 1, r"block_size must be an integer of at least 2 \(got 1\)"),
    ("dflash_config.block_size", ABSENT, r"block_size must be an integer of at least 2 \(got noth"),
    ("dflash_config.mask_token_id", ABSENT, r"mask_token_id must be an integer of at least 0"),
    ("dflash_config.mask_token_id", -1, r"mask_token_id must be an integer of at least 0 \(got -1"),
    ("dflash_config.target_layer_ids", ABSENT, r"target_layer_ids must be a list of integers"),
    ("dflash_config.target_layer_ids", [], r"target_layer_ids must be one or more different"),
    ("dflash_config.target_layer_ids", [1, 1], r"target_layer_ids must be one or more different"),
    ("dflash_config.target_layer_ids", [-1, 2], r"target_layer_ids must be a list of integers of"),
    ("num_hidden_layers", 10**9, r"layers must be an integer of at most 1024 \(got 1000"),
    ("layer_types", ["full_attention"], r"num_hidden_layers must be 1, one per entry"),
    ("layer_types", ["chunked"] * 2, r"layer_types must be a list of sliding_attention \| full"),
    ("layer_types", ABSENT, r"layer_types must be given where use_sliding_window is true"),
    ("use_sliding_window", False, r"use_sliding_window must be true where layer_types has slid"),
    ("use_sliding_window", ABSENT, r"use_sliding_window must be true where layer_types has slid"),
    ("sliding_window", None, r"sliding_window must be an integer of at least 16 \(got nothing\)"),
    ("sliding_window", 15, r"sliding_window must be an integer of at least 16 \(got 15\)"),
    ("is_causal", "yes", r"is_causal must be true, false or a list of 2 of them \(got 'yes'\)"),
    ("is_causal", [True], r"is_causal must be true, false or a list of 2 of them"),
    ("is_causal", [True, 0, False], r"is_causal must be true, false or a list of 2 of them"),
    ("is_causal", [True, 0], r"is_causal must be true, false or a list of 2 of them"),
    ("num_key_value_heads", 3, r"num_attention_heads must be a multiple of 3"),
    ("num_target_layers", 0, r"num_target_layers must be an integer of at least 1"),
]


@pytest.mark.parametrize(("key", "value", "message"), REFUSED)
def test_a_drafter_that_is_not_understood_is_refused_by_name(
    key: str, value: object, message: str, tmp_path: Path
) -> None:
    refused(write(tmp_path, (key, value)), message)


def test_two_answers_about_causality_must_agree(tmp_path: Path) -> None:
    directory = write(tmp_path, ("is_causal", False), ("dflash_config.causal", True))
    refused(directory, r"dflash_config\.causal must be as .*is_causal gives \(got True\)")


def test_heads_that_do_not_divide_the_hidden_size_need_a_head_size(tmp_path: Path) -> None:
    directory = write(tmp_path, ("head_dim", ABSENT), ("num_attention_heads", 6))
    refused(directory, r"head_dim must be given where 6 heads do not divide 64")


def test_a_mask_embedding_file_is_refused(tmp_path: Path) -> None:
    (write(tmp_path) / "mask_embedding.pt").write_bytes(b"")
    refused(tmp_path, r"mask_embedding\.pt must be absent, a mask embedding of its own")


FOREIGN = [
    ("mask_embedding", "a mask embedding of its own"),
    ("lm_head.weight", "a head of its own"),
    ("embed_tokens.weight", "an embedding of its own"),
    ("d2t", "a reduced draft vocabulary"),
    ("t2d", "a reduced draft vocabulary"),
    ("markov_w1.weight", "the Markov head of DSpark"),
    ("confidence_head.proj.weight", "the confidence head of DSpark"),
    ("candidate_selector.predecessor_codebook", "the candidate selector of DFlash2"),
    ("layers.0.attn_conv.base", "the convolutions of DFlash2"),
    ("domino.gru.weight_hh", "the GRU of Domino"),
    ("lilicorr.nodes.weight", "LiLiCorr"),
    ("xpress.proj.weight", "XPress"),
    ("layers.0.self_attn.gate.weight", "a gated projection"),
    ("fc_norm.0.weight", "norms per tap"),
    ("tap_norm.0.weight", "norms per tap"),
    ("layers.0.self_attn.sinks", "attention sinks"),
    ("layers.0.self_attn.q_proj.bias", "no such tensor belongs to this model"),
    ("layers.2.mlp.up_proj.weight", "no such tensor belongs to this model"),
]


@pytest.mark.parametrize(("name", "what"), FOREIGN)
def test_a_tensor_of_another_drafter_is_refused_by_name(
    name: str, what: str, tmp_path: Path
) -> None:
    file = write(tmp_path) / "model.safetensors"
    write_safetensors(file, {**read_safetensors(file), name: np.ones(1, np.float32)})
    refused(tmp_path, rf"{name} must be absent, {what}")


def test_a_missing_and_a_misshapen_tensor_are_named(tmp_path: Path) -> None:
    file = write(tmp_path) / "model.safetensors"
    tensors = read_safetensors(file)
    del tensors["hidden_norm.weight"]
    tensors["fc.weight"] = tensors["fc.weight"][:, :64]
    write_safetensors(file, tensors)
    refused(tmp_path, r"2 misfits: model\.safetensors: fc\.weight must be .* \[64, 192\]")
    refused(tmp_path, r"hidden_norm\.weight must be .* \[64\] \(got nothing\)")


def test_a_name_that_is_no_linear_is_named(tmp_path: Path) -> None:
    checkpoint = read_drafter(write(tmp_path))
    with pytest.raises(CheckpointError, match=r"lm_head must be a linear layer of it"):
        checkpoint.matrix("lm_head")


def test_a_drafter_of_a_target_fits_it(tmp_path: Path) -> None:
    for name, geometry in GEOMETRIES.items():
        target = read_target(write_target(tmp_path / name, geometry, 0)).dims
        drafter = read_drafter(write_drafter(tmp_path / f"{name}-d", geometry, DRAFTER, 0)).dims
        check_pair(target, drafter)


PAIRS = [
    ({"hidden": 80}, r"drafter's hidden_size must be 64, the target's \(got 80\)"),
    ({"vocab": 255}, r"drafter's vocab_size must be 256, the target's \(got 255\)"),
    ({"target_layers": 3}, r"drafter's num_target_layers must be 4, .* \(got 3\)"),
    ({"target_layers": 5}, r"drafter's num_target_layers must be 4, .* \(got 5\)"),
    ({"taps": (1, 4)}, r"target_layer_ids must be layers of the target, 0 to 3 \(got \[1, 4\]\)"),
    ({"mask_token": 256}, r"mask_token_id must be a row of the .* embedding, 0 to 255 \(got 256\)"),
]


@pytest.mark.parametrize(("change", "message"), PAIRS)
def test_a_drafter_of_another_target_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    target = read_target(write_target(tmp_path / "t", TARGET, 0)).dims
    drafter: DrafterCheckpoint = read_drafter(write(tmp_path / "d"))
    with pytest.raises(CheckpointError, match=message):
        check_pair(target, replace(drafter.dims, **change))


def test_the_last_layer_and_the_last_token_fit(tmp_path: Path) -> None:
    target = read_target(write_target(tmp_path / "t", TARGET, 0)).dims
    drafter = read_drafter(write(tmp_path / "d")).dims
    check_pair(target, replace(drafter, taps=(3, 0), mask_token=255, target_layers=0))
