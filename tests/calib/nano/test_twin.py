"""The BF16 twin: the same function as planner-nano, weights that are on no grid."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import GEOMETRIES, dequantised, read_config, write_target
from support.planner_nano import NANO

from thor_dflash.builders.build import build
from thor_dflash.builders.checkpoint.target import read_target
from thor_dflash.calib.nano import twin
from thor_dflash.calib.quantize.linear_rows import LinearRows, ShardReader
from thor_dflash.config.build import BuildConfig
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.progress import Silent
from thor_dflash.core.tensors import Array
from thor_dflash.runtime.measure.score import score
from thor_dflash.runtime.session import open_session


def logits(target: Path, package: Path) -> Array:
    config = BuildConfig(chunk=32, capacity=128, block=16)
    build(target, None, package, config, Silent())
    session = open_session(package, EngineConfig(threads=1), Silent())
    found = score(session, range(5, 45), taps=False, progress=Silent())["logits"]
    session.close()
    return found


@pytest.mark.slow
def test_the_function_is_the_same(tmp_path: Path) -> None:
    write_target(tmp_path / "model", GEOMETRIES["27b"], 3)
    twin.write(tmp_path / "model", tmp_path / "twin")
    want = logits(tmp_path / "model", tmp_path / "a")
    have = logits(tmp_path / "twin", tmp_path / "b")
    # Rounding of weights to BF16 alone; a factor that meets no inverse changes everything.
    assert np.sqrt(np.square(have - want).mean() / np.square(want).mean()) < 0.05
    before, after = dequantised(tmp_path / "model"), dequantised(tmp_path / "twin")
    moved = {n: float(np.abs(after[n] / before[n] - 1).mean()) for n in before if "_proj" in n}
    kept = [name for name, change in moved.items() if change < 0.1]
    assert not kept, kept


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("twin") / "target"
    twin.write(NANO / "target", out)
    return out


def test_it_is_a_checkpoint_without_quantisation(made: Path) -> None:
    read = read_target(made)
    assert read.dims == read_target(NANO / "target").dims
    assert {read.matrix(name).kind.value for name in read.linears} == {"bf16"}
    assert "quantization_config" not in read_config(made)
    assert not (made / "hf_quant_config.json").exists()
    assert (made / "chat_template.jinja").is_file()


def test_no_block_has_the_values_of_the_grid(made: Path) -> None:
    before, after = read_target(NANO / "target"), read_target(made)
    for name in ("layers.0.mlp.up_proj", "layers.3.self_attn.v_proj"):
        with ShardReader(before.shards) as a, ShardReader(after.shards) as b:
            for reader, source, grid in ((a, before, True), (b, after, False)):
                values = np.abs(LinearRows.of(reader, source.linears[name]).read(0, 64))
                blocks = values.reshape(-1, 16)
                count = np.mean([len(np.unique(block)) for block in blocks[:200]])
                assert (count <= 8) == grid, count
