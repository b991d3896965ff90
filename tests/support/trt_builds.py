"""Builds packages with the recorder (trt_recorder.py) in TensorRT's place; returns what the builder
recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from stand_ins import trt_recorder as recorder
from support.checkpoints import GEOMETRIES, Dialect, write_target

from thor_dflash.builders import build as builds
from thor_dflash.builders.build import build
from thor_dflash.config.build import BuildConfig
from thor_dflash.config.tensorrt import TensorRTConfig
from thor_dflash.core.progress import Progress, Silent
from thor_dflash.package import trt_engine as sidecar
from thor_dflash.package.trt_engine import EngineDescription
from thor_dflash.plugins.cuda.driver import DeviceInfo
from thor_dflash.plugins.launch import THOR

NANO = Path(__file__).parents[2] / "models" / "planner-nano"
DEVICE = DeviceInfo("NVIDIA Thor", THOR, 128 << 30, True, 13000)
HYBRID = replace(GEOMETRIES["heads27b"], value_heads=4)
"""A small model whose heads have sizes that the kernels support."""
CAPACITY = 512
CHUNKS = (128, 64)
_OURS = ("thor_dflash.builders.tensorrt.", "thor_dflash.plugins.tensorrt.")


@contextmanager
def recording() -> Iterator[None]:
    """Make `import tensorrt` give the recorder. Modules that imported it are dropped at the end."""

    def bound() -> list[str]:
        found = [name for name in sys.modules if name.startswith(_OURS)]
        return [name for name in found if "trt" in vars(sys.modules[name])]

    with pytest.MonkeyPatch.context() as patch:
        for name in bound():
            patch.delitem(sys.modules, name)
        patch.setitem(sys.modules, "tensorrt", recorder)
        yield
        for name in bound():
            del sys.modules[name]
        assert not recorder.get_plugin_registry().creators, "plugins of a build must go with it"


@dataclass(frozen=True)
class Recorded:
    """A package, and what was recorded for each of its engines, by engine name."""

    out: Path
    engines: dict[str, recorder.Built]

    def description(self, graph: str) -> EngineDescription:
        """Returns the description of a graph's engine that the package holds."""
        return sidecar.read(self.out, graph)


def maker(config: TensorRTConfig, progress: Progress) -> Any:
    """Returns the maker of engines as on a Thor, whose device is not looked for."""
    from thor_dflash.builders.tensorrt.engine import TensorRTBuilder

    return TensorRTBuilder(config, DEVICE, progress)


def options(tmp: Path, **more: Any) -> BuildConfig:
    """Returns options for a small package; `more` are those of the section build.tensorrt."""
    section = TensorRTConfig(timings=str(tmp / "timings"), **more)
    first, *others = CHUNKS
    return BuildConfig(
        engine="tensorrt", chunk=first, chunks=tuple(others), capacity=CAPACITY, tensorrt=section
    )


def record(
    out: Path,
    target: Path,
    drafter: Path | None,
    config: BuildConfig,
    progress: Progress | None = None,
    fault: str = "",
) -> Recorded:
    """Build the package `out`. `fault` is what TensorRT does wrong, see trt_words.FAULTS."""
    recorder.BUILT.clear()
    recorder.FAULTS.clear()
    recorder.FAULTS.add(fault)
    with recording(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(builds, "engine_builder", maker)
        build(target, drafter, out, config, progress or Silent())
    return Recorded(out, {one.network.name: one for one in recorder.BUILT})


def record_hybrid(tmp: Path, dialect: Dialect, fault: str = "", **more: Any) -> Recorded:
    """Build a package of a small model of random weights, stored in `dialect`."""
    if not (tmp / "target").exists():
        write_target(tmp / "target", HYBRID, 1, dialect)
    config = options(tmp, **more)
    return record(tmp / "package", tmp / "target", None, config, fault=fault)
