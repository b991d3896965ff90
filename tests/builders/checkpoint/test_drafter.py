"""A DFlash drafter's checkpoint reads back as it was written; a drafter of another kind is refused
with the name of what it has and DFlash has not.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import (
    ABSENT,
    DIALECTS,
    Dialect,
    DrafterGeometry,
    TargetGeometry,
    change_tensors,
    dequantised,
    edit,
    write_config,
    write_drafter,
    write_target,
)
from support.matrix_values import values_of
from support.published_drafters import MUSE, config_file, published

from thor_dflash.builders.checkpoint.drafter import (
    check_pair,
    drafter_layout,
    read_drafter,
)
from thor_dflash.builders.checkpoint.drafter_config import drafter_dims
from thor_dflash.builders.checkpoint.json_fields import Fields
from thor_dflash.builders.checkpoint.target import read_target
from thor_dflash.builders.synthetic import QWEN36_27B_DFLASH, QWEN38_27B_DFLASH2
from thor_dflash.core.errors import CheckpointError
from thor_dflash.core.model_dims import AttentionDims, DrafterDims, DraftLayerDims, SelectorDims

TARGET = TargetGeometry()
DRAFTER = DrafterGeometry()
CAUSAL = DraftLayerDims(causal=True, window=32)
OPEN = DraftLayerDims(causal=False, window=0)


def write(directory: Path, *changes: tuple[str, object]) -> Path:
    """Writes a drafter whose config has these dotted keys replaced, or removed if ABSENT."""
    return edit(write_drafter(directory, TARGET, DRAFTER, 0), *changes)


def refused(directory: Path, part: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_drafter(directory)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_weight_comes_back(dialect: Dialect, tmp_path: Path) -> None:
    checkpoint = read_drafter(write_drafter(tmp_path, TARGET, DRAFTER, 3, dialect))
    expected = dequantised(tmp_path)
    layout = drafter_layout(checkpoint.dims)
    for name, shape in layout.matrices.items():
        matrix = checkpoint.matrix(name)
        values = values_of(matrix)
        assert (matrix.name, values.shape) == (name, shape)
        np.testing.assert_array_equal(values, expected.pop(f"{name}.weight"))
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
    layout = drafter_layout(QWEN36_27B_DFLASH)
    shapes = [*layout.matrices.values(), *layout.tensors.values()]
    assert len(shapes) == 58
    assert sum(int(np.prod(shape)) for shape in shapes) == 1_730_213_120


Changes = list[tuple[str, object]]
SAME: list[Changes] = [
    [("dflash_config.block_size", ABSENT), ("block_size", 16)],
    [("block_size", 16)],
    [("rope_theta", ABSENT), ("rope_parameters", {"rope_theta": 1e7, "rope_type": "default"})],
    [("rope_scaling", {"type": "default"})],
    [("is_causal", [True, False])],
    [("sample_from_anchor", False), ("is_neox_style", True), ("output_multiplier", 1)],
    [("attention_sink_bias", None), ("final_logit_softcapping", None), ("markov_rank", None)],
    [("quantization_config", {"quant_method": "modelopt"}), ("auto_map", {"AutoModel": "dflash"})],
]


@pytest.mark.parametrize("changes", SAME)
def test_other_spellings_mean_the_same(changes: Changes, tmp_path: Path) -> None:
    plain = read_drafter(write(tmp_path / "a")).dims
    assert read_drafter(write(tmp_path / "b", *changes)).dims == plain


FULL_WINDOW = DraftLayerDims(causal=False, window=32)
FULL_CAUSAL = DraftLayerDims(causal=True, window=0)
VISIBLE: list[tuple[Changes, tuple[DraftLayerDims, ...]]] = [
    ([("layer_types", ABSENT), ("use_sliding_window", False)], (OPEN, OPEN)),
    ([("layer_types", ["full_attention", "sliding_attention"])], (OPEN, CAUSAL)),
    ([("is_causal", True)], (CAUSAL, FULL_CAUSAL)),
    ([("is_causal", False)], (FULL_WINDOW, OPEN)),
    ([("is_causal", [False, True])], (FULL_WINDOW, FULL_CAUSAL)),
    ([("sliding_window", 16)], (DraftLayerDims(causal=True, window=16), OPEN)),
]


@pytest.mark.parametrize(("changes", "layers"), VISIBLE)
def test_what_each_layer_sees(
    changes: Changes, layers: tuple[DraftLayerDims, ...], tmp_path: Path
) -> None:
    assert read_drafter(write(tmp_path, *changes)).dims.layers == layers


REQUIRED = "vocab_size rms_norm_eps hidden_act rope_theta"


@pytest.mark.parametrize("key", REQUIRED.split(" "))
def test_a_key_that_is_missing_or_of_another_type_is_named(key: str, tmp_path: Path) -> None:
    write(tmp_path)
    for value in ([], "x", ABSENT):
        refused(edit(tmp_path, (key, value)), f"config.json: {key} must be ")


F = "dflash_config."
FOREIGN: dict[str, object] = {
    # keys of other drafters, and of DFlash where it would not be read
    "mlp_bias": True, "sample_from_anchor": True, f"{F}sample_from_anchor": True,
    "attention_value_scale": 0.7, "is_neox_style": False, "has_own_lm_head": True,
    "dflash2_config": {}, "speculators_model_type": "dflash", "novel": 1, f"{F}novel": 1,
    f"{F}sliding_window": 32,
}  # fmt: skip
REFUSED: list[tuple[str, object]] = [
    *FOREIGN.items(),
    ("architectures", ["LiLiCorrDraftModel"]),
    ("model_type", "llama"),
    ("hidden_act", "gelu"),
    ("partial_rotary_factor", 0.5),
    ("block_size", 8),
    *((f"{F}target_layer_ids", taps) for taps in ([], [1, 1], [-1, 2])),
    ("layer_types", ["chunked"] * 2),
    ("sliding_window", 15),
    *(("is_causal", value) for value in ("yes", [True], [True, 0, False], [True, 0])),
]
OTHER: list[tuple[str, object, str]] = [
    # the error names another key than the one that was changed
    ("rope_parameters", {"rope_theta": 1e7, "partial_rotary_factor": 0.25}, "partial_rotary_fac"),
    ("rope_scaling", {"rope_type": "yarn"}, "rope_scaling.rope_type must be "),
    *((f"{F}{key}", ABSENT, f"{key} must be ")
      for key in ("block_size", "mask_token_id", "target_layer_ids")),
    ("layer_types", ["full_attention"], "num_hidden_layers must be "),
    ("num_key_value_heads", 3, "num_attention_heads must be "),
]  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value", "part"), [*((k, v, f"json: {k} must be ") for k, v in REFUSED), *OTHER]
)
def test_a_drafter_that_is_not_understood_is_refused_by_name(
    key: str, value: object, part: str, tmp_path: Path
) -> None:
    refused(write(tmp_path, (key, value)), part)


SECOND = replace(DRAFTER, block=8, second=True)
KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
ONE_ONLY = ("DFlashDraftModel", "DFlash2DraftModel")
OF_SECOND: list[tuple[str, object]] = [
    ("architectures", ABSENT),
    ("architectures", [ONE_ONLY[0]]),
    ("architectures", list(ONE_ONLY)),
    *((f"{F}{key}", value) for key in KEYS for value in (ABSENT, 0, "2", 2.0)),
    (f"{F}conv_kernel_size", 1),
    (f"{F}conv_group_size", 48),
    ("selector_rank", 8),
    (f"{F}output_multiplier", 0),
    (f"{F}final_logit_softcapping", -1.0),
    *((f"{F}{key}", 1) for key in ("draft_vocab_size", "pure_draft_prefix_len", "shift_label")),
    ("attention_mode", "mla"),
    ("input_embedding_scale", 0.5),
]
"""Each single change of a DFlash2 drafter's config that must be refused, by the name of its key."""


@pytest.mark.parametrize(("key", "value"), OF_SECOND)
def test_a_dflash2_drafter_has_all_of_its_keys(key: str, value: object, tmp_path: Path) -> None:
    edit(write_drafter(tmp_path, TARGET, SECOND, 0), (key, value))
    refused(tmp_path, f"{key.removeprefix(F)} must be ")


@pytest.mark.parametrize(
    ("key", "value", "tensor"),
    [("conv_kernel_size", 3, "kernel_projection"), ("conv_group_size", 32, "kernel_projection"),
     ("selector_rank", 8, "candidate_selector")],
)  # fmt: skip
def test_a_size_of_dflash2_that_is_not_its_tensors_is_refused(
    key: str, value: int, tensor: str, tmp_path: Path
) -> None:
    edit(write_drafter(tmp_path, TARGET, SECOND, 0), (f"{F}{key}", value))
    refused(tmp_path, tensor)


def test_a_dflash_drafter_has_no_key_of_dflash2(tmp_path: Path) -> None:
    write(tmp_path)
    for key in KEYS:
        refused(edit(tmp_path, (f"{F}{key}", 2)), 'architectures must be ["DFlash2DraftModel"]')
        edit(tmp_path, (f"{F}{key}", ABSENT))


TENSORS = (
    "layers.1.attention_conv.base_kernel",
    "layers.0.mlp_conv.kernel_projection.weight",
    "candidate_selector.hidden_projection.weight",
    "candidate_selector.predecessor_codebook",
)


@pytest.mark.parametrize("name", TENSORS)
def test_each_tensor_of_dflash2_is_required_as_it_is(name: str, tmp_path: Path) -> None:
    write_drafter(tmp_path, TARGET, SECOND, 0)
    change_tensors(tmp_path, lambda t: t.update({name: t[name].T.copy()}))
    refused(tmp_path, f"{name} must be ")
    change_tensors(tmp_path, lambda t: t.update({name: t[name].T.astype(np.int32)}))
    refused(tmp_path, f"{name} must be ")
    change_tensors(tmp_path, lambda t: t.pop(name))
    refused(tmp_path, f"{name.removesuffix('.weight')}")


def test_tensors_of_dflash2_do_not_belong_to_a_dflash_drafter(tmp_path: Path) -> None:
    write_drafter(tmp_path, TARGET, SECOND, 0)
    edit(tmp_path, ("architectures", ABSENT), *((f"{F}{key}", ABSENT) for key in KEYS))
    edit(tmp_path, (f"{F}output_multiplier", ABSENT))
    refused(tmp_path, "must be absent")


def test_the_published_config_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(config_file())
    digest = "873e3556509b0da06e29654ba00d4944888d4b5e8a33afde25f7eb27d321e980"
    assert hashlib.sha256(config_file()).hexdigest() == digest, "the bytes of the published file"
    assert drafter_dims(Fields.read(tmp_path / "config.json")) == QWEN38_27B_DFLASH2
    layout = drafter_layout(QWEN38_27B_DFLASH2)
    shapes = [*layout.matrices.values(), *layout.tensors.values()]
    assert len(shapes) == 81
    assert sum(int(np.prod(shape)) for shape in shapes) == 1_924_404_480


def test_the_other_published_drafter_has_multiplier_and_softcap(tmp_path: Path) -> None:
    write_config(tmp_path, published(**MUSE))
    dims = drafter_dims(Fields.read(tmp_path / "config.json"))
    assert dims.selector == SelectorDims(
        rank=256, top_k=16, multiplier=0.19611613513818404, softcap=20.0
    )
    layout = drafter_layout(dims)
    shapes = [*layout.matrices.values(), *layout.tensors.values()]
    assert sum(int(np.prod(shape)) for shape in shapes) == 2_772_159_744


@pytest.mark.parametrize(
    "name", ["lm_head.weight", "d2t", "layers.0.attn_conv.base", "layers.2.mlp.up_proj.weight"]
)
def test_a_tensor_of_another_drafter_is_refused_by_name(name: str, tmp_path: Path) -> None:
    change_tensors(write(tmp_path), lambda t: t.update({name: np.ones(1, np.float32)}))
    refused(tmp_path, f"{name} must be absent")


@pytest.mark.parametrize(
    ("field", "value", "key"),
    [("hidden", 80, "hidden_size"), ("vocab", 255, "vocab_size"),
     ("target_layers", 3, "num_target_layers"), ("target_layers", 5, "num_target_layers"),
     ("taps", (1, 4), "target_layer_ids"), ("mask_token", 256, "mask_token_id")],
)  # fmt: skip
def test_a_drafter_of_another_target_is_refused(
    field: str, value: Any, key: str, tmp_path: Path
) -> None:
    target = read_target(write_target(tmp_path / "t", TARGET, 0)).dims
    drafter = read_drafter(write(tmp_path / "d")).dims
    with pytest.raises(CheckpointError, match=f"drafter's {key} must be "):
        check_pair(target, replace(drafter, **{field: value}))
