"""A target checkpoint of every dialect reads back as it was written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import (
    DIALECTS,
    GEOMETRIES,
    Dialect,
    TargetGeometry,
    change_tensors,
    dequantised,
    edit,
    read_safetensors,
    write_safetensors,
    write_target,
)
from support.matrix_values import values_of

from thor_dflash.builders.checkpoint.quantized_matrix import WeightFormat
from thor_dflash.builders.checkpoint.target import read_target, target_layout
from thor_dflash.builders.synthetic import QWEN36_27B
from thor_dflash.core.errors import CheckpointError
from thor_dflash.core.model_dims import AttentionDims, GdnDims, TargetDims

SMALL = TargetGeometry(prefix="model.language_model.")
ODD = TargetGeometry(key_dim=48, value_dim=16, conv_kernel=3, layers=5, intermediate=112)
TIED = replace(SMALL, tied=True)
P = SMALL.prefix
MODELOPT_KV = ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale")
TENSORS_KV = ("self_attn.k_scale", "self_attn.v_scale")


def hf_name(name: str) -> str:
    return name if name == "lm_head" else f"model.{name}"


@pytest.mark.parametrize(
    ("geometry", "dialect"),
    [*((g, DIALECTS[i % len(DIALECTS)]) for i, g in enumerate([*GEOMETRIES, "odd"])),
     *(("27b", dialect) for dialect in DIALECTS)],
)  # fmt: skip
def test_every_weight_comes_back(geometry: str, dialect: Dialect, tmp_path: Path) -> None:
    g = GEOMETRIES.get(geometry, ODD)
    checkpoint = read_target(write_target(tmp_path, g, 7, dialect))
    expected = dequantised(tmp_path)
    layout = target_layout(checkpoint.dims)
    for name, shape in layout.matrices.items():
        matrix = checkpoint.matrix(name)
        values = values_of(matrix)
        assert (matrix.name, values.shape) == (name, shape)
        np.testing.assert_array_equal(values, expected.pop(f"{hf_name(name)}.weight"))
    for name in layout.tensors:
        tensor = checkpoint.tensor(name).astype(np.float32)
        np.testing.assert_array_equal(tensor, expected.pop(hf_name(name)))
    assert set(expected) <= {"lm_head.weight"}
    head = checkpoint.matrix("lm_head")
    assert (head.name, values_of(head).shape) == ("lm_head", (g.vocab, g.hidden))


def test_sizes_come_from_the_config(tmp_path: Path) -> None:
    g = GEOMETRIES["heads27b"]
    checkpoint = read_target(write_target(tmp_path, replace(g, eps=2e-5, rope_theta=1e6), 0))
    assert checkpoint.dims == TargetDims(
        vocab=256,
        hidden=64,
        intermediate=96,
        layers=("gdn", "gdn", "gdn", "attention"),
        attention=AttentionDims(heads=6, kv_heads=1, head_dim=256, rotary_dim=64, rope_theta=1e6),
        gdn=GdnDims(key_heads=1, value_heads=3, key_dim=128, value_dim=128, conv_kernel=4),
        eps=2e-5,
        tied=False,
        max_position=4096,
    )
    assert (checkpoint.prefix, checkpoint.skipped) == ("model.", ())
    assert checkpoint.directory == tmp_path


def test_the_layout_of_the_27b_has_851_tensors() -> None:
    layout = target_layout(QWEN36_27B)
    shapes = [*layout.matrices.values(), *layout.tensors.values()]
    assert len(shapes) == 851
    # The published total: 55,562,855,904 bytes of BF16 less the vision tower and the MTP head.
    assert sum(int(np.prod(shape)) for shape in shapes) == 26_895_998_464


@pytest.mark.parametrize(
    ("dialect", "mlp", "attention", "gdn", "head"),
    [
        ("f16", "f16", "f16", "f16", "f16"),
        ("modelopt", "nvfp4", "nvfp4", "nvfp4", "nvfp4"),
        ("compressed-tensors", "nvfp4", "nvfp4", "nvfp4", "bf16"),
        ("fp8", "fp8", "fp8", "fp8", "bf16"),
        ("mixed", "nvfp4", "fp8", "bf16", "nvfp4"),
    ],
)
def test_the_tensors_decide_the_kind_whatever_the_json_says(
    dialect: Dialect, mlp: str, attention: str, gdn: str, head: str, tmp_path: Path
) -> None:
    write_target(tmp_path, SMALL, 0, dialect)
    edit(tmp_path, ("quantization_config", {"quant_algo": "FP8"}))
    checkpoint = read_target(tmp_path)
    names = {
        "layers.3.mlp.down_proj": mlp,
        "layers.3.self_attn.q_proj": attention,
        "layers.0.linear_attn.in_proj_qkv": gdn,
        "layers.0.linear_attn.in_proj_a": "f16" if dialect == "f16" else "bf16",
        "lm_head": head,
    }
    for name, kind in names.items():
        assert checkpoint.matrix(name).kind is WeightFormat(kind), name


def test_vision_and_mtp_are_passed_over_and_listed(tmp_path: Path) -> None:
    checkpoint = read_target(write_target(tmp_path, GEOMETRIES["27b"], 0))
    assert set(checkpoint.skipped) == {"mtp.fc.weight"}
    assert checkpoint.prefix == "model.language_model."
    file = write_target(tmp_path / "others", SMALL, 0) / "model.safetensors"
    others = dict.fromkeys(("visual.x", "vision_tower.x"), np.ones(1, np.float32))
    write_safetensors(file, {**read_safetensors(file), **others})
    assert set(read_target(file.parent).skipped) == set(others)


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    checkpoint = read_target(write_target(tmp_path, TIED, 0))
    assert checkpoint.dims.tied
    np.testing.assert_array_equal(
        checkpoint.matrix("lm_head").codes, checkpoint.tensor("embed_tokens.weight")
    )


@pytest.mark.parametrize(("names", "shape"), [(MODELOPT_KV, ()), (TENSORS_KV, (1,))])
def test_calibrated_kv_scales_are_found(
    names: tuple[str, str], shape: tuple[int, ...], tmp_path: Path
) -> None:
    write_target(tmp_path, SMALL, 0)
    assert read_target(tmp_path).kv_scales(3) is None
    stored = [f"{P}layers.3.{name}" for name in names]
    scales = [np.full(shape, x, np.float32) for x in (0.25, 0.5)]
    change_tensors(tmp_path, lambda t: t.update(dict(zip(stored, scales, strict=True))))
    checkpoint = read_target(tmp_path)
    assert checkpoint.kv_scales(3) == (0.25, 0.5)
    assert checkpoint.kv_scales(0) is None


@pytest.mark.parametrize("names", [MODELOPT_KV, TENSORS_KV])
def test_scales_of_other_arithmetic_are_listed_and_not_used(
    names: tuple[str, str], tmp_path: Path
) -> None:
    geometry = replace(SMALL, heads=4, kv_heads=2)
    write_target(tmp_path, geometry, 0)
    other = ("self_attn.q_scale", "self_attn.k_proj.output_scale", "self_attn.prob_output_scale")
    shape = (geometry.kv_heads, 1, 1)
    scales = {f"{P}layers.3.{n}": np.full(shape, 0.25, np.float32) for n in (*names, *other)}
    change_tensors(tmp_path, lambda t: t.update(scales))
    checkpoint = read_target(tmp_path)
    assert checkpoint.kv_scales(3) is None
    assert set(checkpoint.skipped) == set(scales)
    [usable] = {MODELOPT_KV, TENSORS_KV} - {names}
    numbers = {f"{P}layers.3.{n}": np.full((), 0.5, np.float32) for n in usable}
    change_tensors(tmp_path, lambda t: t.update(numbers))
    checkpoint = read_target(tmp_path)
    assert (checkpoint.kv_scales(3), set(checkpoint.skipped)) == ((0.5, 0.5), set(scales))
    change_tensors(tmp_path, lambda t: t.update({next(iter(scales)): np.ones(3, np.float32)}))
    with pytest.raises(CheckpointError, match="one for each of 2 key/value heads"):
        read_target(tmp_path)


@pytest.mark.parametrize("outer", [True, False])
def test_of_two_flags_for_a_tied_head_a_wrappers_own_counts(outer: bool, tmp_path: Path) -> None:
    """transformers writes such files, and loads them so."""
    write_target(tmp_path, replace(SMALL, tied=outer, wrapper=True), 0)
    edit(tmp_path, ("text_config.tie_word_embeddings", not outer))
    assert read_target(tmp_path).dims.tied is outer


FP8, FP4 = {"num_bits": 8, "type": "float"}, {"num_bits": 4, "type": "float"}


def test_whose_cache_scales_are_for_must_be_readable(tmp_path: Path) -> None:
    """Taken for absent, scales of an NVFP4 cache would be used for FP8."""
    write_target(tmp_path, SMALL, 0)
    stored = {f"{P}layers.3.{n}": np.float32(0.5) for n in MODELOPT_KV}
    change_tensors(tmp_path, lambda t: t.update({n: np.array(x) for n, x in stored.items()}))
    (tmp_path / "hf_quant_config.json").symlink_to("gone")
    with pytest.raises(CheckpointError, match="must be a file .got a link to nothing"):
        read_target(tmp_path)
