"""Synthetic checkpoints: what their shape says, readable by everything that reads real ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import read_safetensors

from thor_dflash.builders.checkpoint.drafter import read_drafter
from thor_dflash.builders.checkpoint.drafter_config import drafter_dims
from thor_dflash.builders.checkpoint.json_fields import Fields
from thor_dflash.builders.checkpoint.target import read_target
from thor_dflash.builders.checkpoint.target_config import target_dims
from thor_dflash.calib.quantize import checkpoint
from thor_dflash.calib.quantize.plan import make_plan
from thor_dflash.calib.synthetic import random_tensors, shapes
from thor_dflash.config.quantize import QuantizeConfig
from thor_dflash.core.errors import ConfigError
from thor_dflash.core.progress import Silent

PUBLISHED = {
    "qwen3.5-0.8b": 0.752, "qwen3.5-2b": 1.882, "qwen3.5-4b": 4.206, "qwen3.5-9b": 8.954,
    "qwen3.6-27b": 26.896, "qwen3.8-27b": 26.896,
}  # fmt: skip
"""Parameters of the text model, in billions: spec of the family."""


@pytest.mark.parametrize("name", shapes.TARGETS)
def test_a_target_has_its_published_size_and_config(name: str) -> None:
    dims = shapes.target_shape(name, None)
    stored = random_tensors.random_target(dims).shards.stored.values()
    count = sum((entry.end - entry.begin) // 2 for entry in stored)
    assert round(count / 1e9, 3) == PUBLISHED[name]
    assert target_dims(Fields("config.json: ", shapes.target_config(dims))) == dims


@pytest.mark.parametrize("name", shapes.DRAFTERS)
@pytest.mark.parametrize("layers", [None, 32])
def test_a_drafter_fits_its_target(name: str, layers: int | None) -> None:
    dims = shapes.drafter_shape(name, layers)
    assert drafter_dims(Fields("config.json: ", shapes.drafter_config(dims))) == dims
    assert max(dims.taps) < len(shapes.target_shape(name, layers).layers) == dims.target_layers


@pytest.mark.parametrize(
    ("name", "layers", "drafter"),
    [
        ("qwen3.6-27b", 3, False), ("qwen3.6-27b", 68, False), ("qwen3.6-27b", 0, False),
        ("27b", None, False), ("qwen3.5-9b", None, True), ("qwen3.6-27b", 4, True),
    ],
)  # fmt: skip
def test_a_shape_that_does_not_exist_is_refused(
    name: str, layers: int | None, drafter: bool
) -> None:
    with pytest.raises(ConfigError, match=r"--(shape|layers) must be"):
        (shapes.drafter_shape if drafter else shapes.target_shape)(name, layers)


def test_a_written_checkpoint_is_read_and_has_the_same_values_in_any_order(tmp_path: Path) -> None:
    whole = shapes.target_shape("qwen3.5-0.8b", 4)
    dims = replace(whole, vocab=4096, hidden=256, intermediate=512)  # a part has over PERIOD values
    source, made = random_tensors.random_target(dims), shapes.target_config(dims)
    reader = random_tensors.RandomReader(source.shards, drafter=False)
    for preset in ("keep", "nvidia"):
        plan = make_plan(source, QuantizeConfig(preset=preset, method="rtn"), from_quantised=False)
        checkpoint.write_tensors(plan, reader, made, "key", tmp_path / preset, Silent())
        assert read_target(tmp_path / preset).dims == dims
    tensors = read_safetensors(tmp_path / "keep" / "model.safetensors")
    name = "model.language_model.embed_tokens.weight"
    table = tensors[name].astype(np.float32)
    assert table.std() == pytest.approx(0.02, rel=0.01)
    assert len(np.unique(table, axis=0)) == len(table)
    np.testing.assert_array_equal(reader.rows(name, 4000, 4010), tensors[name][4000:4010])
    assert np.isfinite(table).all()


def test_a_written_drafter_is_read(tmp_path: Path) -> None:
    whole = shapes.drafter_shape("qwen3.8-27b", None)
    dims = replace(whole, vocab=512, hidden=128, intermediate=256)
    source = random_tensors.random_drafter(dims)
    plan = make_plan(source, QuantizeConfig(method="rtn"), from_quantised=False)
    reader = random_tensors.RandomReader(source.shards, drafter=True)
    config = shapes.drafter_config(dims)
    checkpoint.write_tensors(plan, reader, config, "key", tmp_path / "out", Silent())
    assert read_drafter(tmp_path / "out").dims == dims
