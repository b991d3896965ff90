"""NVFP4 encoded on the GPU: the bytes of numpy, in the encoder alone and through a whole run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from support.checkpoints import GEOMETRIES, write_target

from thor_dflash.calib.quantize import checkpoint, nvfp4
from thor_dflash.calib.quantize.cuda_encoder import CudaEncoder, Scaling
from thor_dflash.calib.quantize.plan import make_plan
from thor_dflash.config.engine import EngineConfig
from thor_dflash.config.quantize import QuantizeConfig
from thor_dflash.core.progress import Silent

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpu() -> Iterator[CudaEncoder]:
    with CudaEncoder(0, EngineConfig().cubins_directory) as made:
        yield made


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("method", ["rtn", "mse", "act"])
@pytest.mark.parametrize("shape", [(1, 16), (3, 80), (512, 5120)])
def test_the_gpu_writes_the_same_bytes(
    gpu: CudaEncoder, method: str, dtype: type, shape: tuple[int, int]
) -> None:
    rng = np.random.default_rng(8)
    rows = rng.standard_t(4, shape) * 10.0 ** rng.integers(-8, 3, (shape[0], 1))
    rows[0, :16] = -0.0
    stored = rows.astype(dtype)
    exact = stored.astype(np.float32)
    amax = float(np.abs(exact).max()) or 1.0
    energy = rng.lognormal(0, 2, shape[1]).astype(np.float32)
    weights = nvfp4.channel_weights(energy) if method == "act" else None
    found = gpu.encode(stored, Scaling.of(method, amax, weights))
    blocks, second = nvfp4.as_blocks(exact), nvfp4.tensor_scale(amax)
    scales = nvfp4.rounded_scales(blocks, second)
    if method != "rtn":
        scales = nvfp4.searched_scales(blocks, np.float32(amax), weights)
    want = nvfp4.encode(blocks, scales, second)
    np.testing.assert_array_equal(found.scales, want.scales)
    np.testing.assert_array_equal(found.codes, want.codes)
    assert found.flushed == want.flushed


def test_a_checkpoint_is_the_same_with_and_without_a_gpu(tmp_path: Path) -> None:
    source = write_target(tmp_path / "bf16", GEOMETRIES["heads27b"], 3)
    made: list[dict[str, bytes]] = []
    for device in ("cpu", "cuda"):
        config = QuantizeConfig(preset="all-nvfp4", device=device)
        plan = make_plan(checkpoint.read_source(source, None), config, from_quantised=False)
        checkpoint.write(plan, tmp_path / device, Silent())
        made.append({p.name: p.read_bytes() for p in (tmp_path / device).iterdir()})
    assert made[0] == made[1]
