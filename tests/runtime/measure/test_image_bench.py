"""`bench --image`: what it runs, and how it counts the work of a tower."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from thor_dflash.cli.commands import bench
from thor_dflash.config.tree import Config
from thor_dflash.core.errors import ConfigError
from thor_dflash.core.model_dims import TowerDims
from thor_dflash.core.progress import Silent
from thor_dflash.runtime.measure.image_bench import flop, measure_image
from thor_dflash.runtime.vision.picture import PatchGrid


@pytest.mark.parametrize(
    ("grid", "want"), [((16, 16), 0.23), ((30, 40), 1.20), ((44, 80), 4.53), ((68, 120), 15.2)]
)
def test_the_work_of_the_27b_s_tower(grid: tuple[int, int], want: float) -> None:
    """In TFLOP; counted by hand from the tower's products, not by this code."""
    dims = TowerDims(depth=27, hidden=1152, heads=16, intermediate=4304, positions=48)
    assert flop(PatchGrid(*grid), dims, 5120) / 1e12 == pytest.approx(want, rel=0.005, abs=0.006)


@pytest.mark.parametrize(("image", "ready"), [("640", False), ("640xx", False), ("64x64", True)])
def test_a_size_that_is_none_is_refused_before_anything_is_loaded(
    image: str, *, ready: bool
) -> None:
    args = Namespace(image=[image], ready=ready, package="none", out=None, json=False)
    with pytest.raises(ConfigError, match="--image"):
        bench.run(args, Config(), Silent())


def test_a_package_without_a_tower_is_refused() -> None:
    blind = SimpleNamespace(manifest=SimpleNamespace(vision=None))
    with pytest.raises(ConfigError, match="tower"):
        measure_image(cast("Any", blind), (64, 64))
