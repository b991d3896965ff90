"""A vision tower in a checkpoint: whole, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.checkpoints import (
    GEOMETRIES,
    TargetGeometry,
    read_config,
    read_safetensors,
    write_config,
    write_safetensors,
    write_target,
)

from thor_dflash.builders.build import build
from thor_dflash.builders.checkpoint.vision import read_vision, tower_layout
from thor_dflash.config.build import BuildConfig
from thor_dflash.core.errors import CheckpointError, ConfigError
from thor_dflash.core.model_dims import TowerDims
from thor_dflash.core.progress import Silent

STEM = "model.visual."


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_target(tmp_path / "target", GEOMETRIES["seeing"], 1)


@pytest.mark.parametrize(
    ("depth", "hidden", "intermediate", "out", "tensors", "parameters"),
    [
        (12, 768, 3072, 1024, 153, 100_592_896),
        (24, 1024, 4096, 2048, 297, 331_416_576),
        (27, 1152, 4304, 5120, 333, 460_730_096),
    ],
)
def test_the_published_towers(
    depth: int, hidden: int, intermediate: int, out: int, tensors: int, parameters: int
) -> None:
    heads = 12 if hidden == 768 else 16
    dims = TowerDims(
        depth=depth, hidden=hidden, heads=heads, intermediate=intermediate, positions=48
    )
    shapes = tower_layout(dims, out).tensors
    assert len(shapes) == tensors
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == parameters


def test_a_tower_is_read(target: Path) -> None:
    found = read_vision(target, "auto")
    assert found
    assert found.dims.tower.head_dim == 72
    assert found.dims.mrope == (2, 2)
    assert found.dims.reserved == (241, 240, 242, 243)
    assert found.tensor("blocks.0.norm1.bias").dtype == np.float32
    assert found.matrix("patch_embed.proj").codes.shape == (144, 1536)
    assert read_vision(target, "off") is None


def test_none_is_needed_unless_it_is_asked_for(tmp_path: Path) -> None:
    write_target(tmp_path, TargetGeometry(), 1)
    assert read_vision(tmp_path, "auto") is None
    with pytest.raises(CheckpointError, match="vision on"):
        read_vision(tmp_path, "on")


def changed(target: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = target / "model_visual.safetensors"
    tensors = read_safetensors(file)
    change(tensors)
    write_safetensors(file, tensors)


QKV = f"{STEM}blocks.1.attn.qkv.weight"
DAMAGE: dict[str, Callable[[dict[str, Any]], object]] = {
    "missing": lambda t: t.pop(QKV),
    "no bias": lambda t: t.pop(f"{STEM}merger.linear_fc1.bias"),
    "extra": lambda t: t.update({f"{STEM}deepstack.0.weight": np.ones(2, np.float32)}),
    "transposed": lambda t: t.update({QKV: np.ascontiguousarray(t[QKV].T)}),
    "quantised": lambda t: t.update(
        {QKV: t[QKV].astype(ml_dtypes.float8_e4m3fn), f"{QKV}_scale": np.ones((), np.float32)}
    ),
    "half of it": lambda t: [t.pop(name) for name in list(t)[::2]],
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_part_of_a_tower_is_an_error(target: Path, name: str) -> None:
    changed(target, DAMAGE[name])
    with pytest.raises(CheckpointError, match=r"model\.visual\..*--vision off"):
        read_vision(target, "auto")


CONFIG: dict[str, tuple[str, str, object]] = {
    "deepstack": ("vision_config", "deepstack_visual_indexes", [3]),
    "activation": ("vision_config", "hidden_act", "relu"),
    "patch": ("vision_config", "patch_size", 14),
    "merge": ("vision_config", "spatial_merge_size", 4),
    "out": ("vision_config", "out_hidden_size", 96),
    "positions": ("vision_config", "num_position_embeddings", 50),
    "sections": ("rope", "mrope_section", [3, 3]),
    "sum": ("rope", "mrope_section", [3, 3, 3]),
    "contiguous": ("rope", "mrope_interleaved", False),
    "mean": ("processor", "image_mean", [0.48, 0.46, 0.41]),
    "resample": ("processor", "resample", 2),
}


@pytest.mark.parametrize("name", CONFIG)
def test_another_arithmetic_is_refused_by_its_key(target: Path, name: str) -> None:
    place, key, value = CONFIG[name]
    config, file = read_config(target), target / "preprocessor_config.json"
    processor = json.loads(file.read_text())
    rope = config["text_config"]["rope_parameters"]
    {"rope": rope, "processor": processor}.get(place, config.get(place))[key] = value
    write_config(target, config)
    file.write_text(json.dumps(processor))
    with pytest.raises(CheckpointError, match=key):
        read_vision(target, "auto")


def test_without_the_file_of_the_processor_nothing_is_guessed(target: Path) -> None:
    (target / "preprocessor_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json"):
        read_vision(target, "auto")


def test_off_leaves_the_package_of_a_text_model(target: Path, tmp_path: Path) -> None:
    made = build(target, None, tmp_path / "off", BuildConfig(vision="off"), Silent())
    assert made.vision is None
    assert any(name.startswith(STEM) for name in made.skipped)
    plain = write_target(tmp_path / "plain", GEOMETRIES["seeing"], 1)
    (plain / "model_visual.safetensors").unlink()
    text = build(plain, None, tmp_path / "text", BuildConfig(), Silent())
    assert made.files == text.files, "byte for byte"


@pytest.mark.parametrize("size", [6, 100_000])
def test_sizes_of_the_graph_are_checked(target: Path, tmp_path: Path, size: int) -> None:
    with pytest.raises(ConfigError, match="image_patches"):
        build(target, None, tmp_path / "p", BuildConfig(image_patches=(size,)), Silent())


def test_tensorrt_has_no_tower(target: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vision"):
        build(target, None, tmp_path / "p", BuildConfig(engine="tensorrt", vision="on"), Silent())
