"""The MTP layer's tensors are checked by name and shape, and are part of a package on request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import GEOMETRIES, Array, change_tensors, edit, write_target

from thor_dflash.builders.build import build
from thor_dflash.builders.checkpoint.mtp import HALVES, read_mtp
from thor_dflash.config.build import BuildConfig
from thor_dflash.core.errors import CheckpointError, ConfigError
from thor_dflash.core.progress import Silent

WHOLE = replace(GEOMETRIES["27b"], mtp=True)


def test_its_fifteen_tensors_are_read(tmp_path: Path) -> None:
    found = read_mtp(write_target(tmp_path, WHOLE, 3), 3)
    stored = [name for name in found.shards if name.startswith("mtp.")]
    assert len(stored) == 15
    whole = found.shards.array("mtp.fc.weight")
    halves = [found.matrix(name).codes for name in HALVES]
    np.testing.assert_array_equal(np.concatenate(halves, axis=1), whole)
    norm = found.tensor("norm.weight")
    assert norm.dtype == np.float32
    np.testing.assert_array_equal(norm - 1, found.shards.array("mtp.norm.weight"))
    assert (found.dims.kind, found.dims.block) == ("mtp", 4)


def _without(name: str) -> Callable[[dict[str, Array]], object]:
    return lambda tensors: tensors.pop(f"mtp.{name}.weight")


def _transposed(name: str) -> Callable[[dict[str, Array]], object]:
    def change(tensors: dict[str, Array]) -> None:
        tensors[name] = np.ascontiguousarray(tensors[name].T)

    return change


def _more(tensors: dict[str, Array]) -> None:
    tensors["mtp.layers.1.input_layernorm.weight"] = tensors["mtp.norm.weight"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_without("layers.0.self_attn.q_norm"), "mtp.layers.0.self_attn.q_norm.weight"),
        (_without("fc"), "mtp.fc.weight"),
        (_transposed("mtp.fc.weight"), "mtp.fc.weight"),
        (_transposed("mtp.layers.0.self_attn.k_proj.weight"), "self_attn.k_proj"),
        (_more, "mtp.layers.1.input_layernorm.weight"),
    ],
)
def test_a_layer_that_is_not_whole_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Array]], object], named: str
) -> None:
    target = write_target(tmp_path, WHOLE, 3)
    change_tensors(target, change)
    with pytest.raises(CheckpointError, match=named):
        read_mtp(target, 3)


def test_a_checkpoint_without_it_or_with_another_kind_is_refused(tmp_path: Path) -> None:
    bare = write_target(tmp_path / "none", GEOMETRIES["0.8b"], 3)
    with pytest.raises(CheckpointError, match=r"--drafter mtp \(got no tensor mtp\.\*\)"):
        read_mtp(bare, 3)
    with pytest.raises(CheckpointError, match=r"--drafter mtp \(got mtp_num_hidden_layers 0\)"):
        read_mtp(edit(bare, ("mtp_num_hidden_layers", 0)), 3)
    target = write_target(tmp_path / "two", WHOLE, 3)
    with pytest.raises(CheckpointError, match=r"absent or 0 or 1 \(got 2\)"):
        read_mtp(edit(target, ("text_config.mtp_num_hidden_layers", 2)), 3)


def test_tensorrt_is_refused(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", WHOLE, 3)
    with pytest.raises(ConfigError, match="tensorrt"):
        build(target, "mtp", tmp_path / "out", BuildConfig(engine="tensorrt"), Silent())
