"""Builds packages with TensorRT for RTX in TensorRT's place: NVIDIA's own parser and builder, which
need neither a GPU nor a driver. Its engines are for SM120, the nearest relative of a Thor that it
has, and nothing executes them.

It cannot load an engine without a driver, so its inspector cannot be asked. But it logs what the
inspector would report, and the checks of builders/tensorrt/inspection.py read that.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from onnx import TensorProto
from support.checkpoints import GEOMETRIES, Dialect, write_target

from thor_dflash.builders import build as builds
from thor_dflash.builders.build import build, make_plan, material
from thor_dflash.builders.checkpoint.drafter import read_drafter
from thor_dflash.builders.checkpoint.target import read_target
from thor_dflash.builders.output.weight_files import WeightFiles
from thor_dflash.builders.tensorrt.inspection import InspectedLayer, InspectedTensor, problems
from thor_dflash.builders.tensorrt.package import EnginePlan, plan_engines
from thor_dflash.builders.tensorrt.profiles import EngineGraphs
from thor_dflash.builders.tensorrt.weight_constants import EngineConstants
from thor_dflash.config.build import BuildConfig
from thor_dflash.config.tensorrt import TensorRTConfig
from thor_dflash.core.progress import Progress, Silent
from thor_dflash.package import trt_engine as sidecar
from thor_dflash.package.trt_engine import EngineDescription
from thor_dflash.plugins.cuda.driver import DeviceInfo
from thor_dflash.plugins.launch import THOR
from thor_dflash.plugins.tensorrt.node import PluginNode

NANO = Path(__file__).parents[2] / "models" / "planner-nano"
DEVICE = DeviceInfo("NVIDIA Thor", THOR, 128 << 30, True, 13000)
"""The device that launches are planned for. None is looked for."""
HYBRID = replace(GEOMETRIES["heads27b"], value_heads=4)
"""A small model whose heads have sizes that the kernels support."""
CAPACITY = 512
CHUNKS = (128, 64)
BUILDER = "tensorrt_rtx"
"""Name of the packages: tensorrt_rtx_bindings and tensorrt_rtx_libs."""
VERSION = "10.99"
"""In place of 1.7: TensorRT for RTX counts its versions otherwise, and has TensorRT 10.16's API."""
_OURS = ("thor_dflash.builders.tensorrt.", "thor_dflash.plugins.tensorrt.")


@cache
def tensorrt(capability: str = "SM120") -> ModuleType:
    """Return TensorRT for RTX as the module `tensorrt`, building for a device that is not there."""
    found = importlib.util.find_spec(f"{BUILDER}_libs")
    if found is None or found.origin is None or not importlib.util.find_spec(f"{BUILDER}_bindings"):
        pytest.skip(f"{BUILDER}_bindings must be installed, which there is for x86-64 alone")
    _open_libraries(Path(found.origin).parent)
    real = importlib.import_module(f"{BUILDER}_bindings")

    class Builder(real.Builder):
        def create_builder_config(self) -> Any:
            config = super().create_builder_config()
            config.num_compute_capabilities = 1
            config.set_compute_capability(getattr(real.ComputeCapability, capability), 0)
            return config

    module = ModuleType("tensorrt")
    vars(module).update({name: x for name, x in vars(real).items() if not name.startswith("__")})
    vars(module).update(Builder=Builder, __version__=VERSION)
    return module


def _open_libraries(libraries: Path) -> None:
    """Open its libraries through links. The parser opens the builder under a name that the wheel
    lacks, in the directory that it was itself opened from.
    """
    links = Path(tempfile.mkdtemp(prefix="tensorrt-rtx-"))
    for library in libraries.glob("*.so.1"):
        (links / library.name).symlink_to(library)
        (links / library.name.removesuffix(".1")).symlink_to(library)
    for library in sorted(links.glob("*.so.1"), reverse=True):
        ctypes.CDLL(str(library))


@contextmanager
def building() -> Iterator[None]:
    """Make `import tensorrt` give TensorRT for RTX. Modules that imported it go at the end."""
    module = tensorrt()

    def bound() -> list[str]:
        found = [name for name in sys.modules if name.startswith(_OURS)]
        return [name for name in found if "trt" in vars(sys.modules[name])]

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it deprecates the timing cache
        for name in bound():
            patch.delitem(sys.modules, name)
        patch.setitem(sys.modules, "tensorrt", module)
        yield
        for name in bound():
            del sys.modules[name]
        gc.collect()  # it also deprecates how its objects end
        ours = [one for one in module.get_plugin_registry().all_creators if "Thor" in one.name]
        assert not ours, "the creators of a build must go with it"


@dataclass
class BuiltEngine:
    """What a builder made of an engine's graphs."""

    together: EngineGraphs
    path: Path
    layers: list[InspectedLayer] = field(default_factory=list)
    tensors: list[InspectedTensor] = field(default_factory=list)
    seconds: float = 0

    @property
    def nbytes(self) -> int:
        return self.path.stat().st_size


@dataclass
class BuiltPackage:
    """A package, and its engines by name."""

    out: Path
    engines: dict[str, BuiltEngine] = field(default_factory=dict)
    settings: list[dict[str, Any]] = field(default_factory=list)
    """What every engine was built with."""

    def description(self, graph: str) -> EngineDescription:
        """Return the description of a graph's engine that the package holds."""
        return sidecar.read(self.out, graph)


def options(tmp: Path, **more: Any) -> BuildConfig:
    """Return options for a small package; `more` are those of the section build.tensorrt. The
    words of this builder are known, so an unknown one is refused.
    """
    section = TensorRTConfig(timings=str(tmp / "timings"), **{"inspect": "refuse", **more})
    first, *others = CHUNKS
    return BuildConfig(
        engine="tensorrt", chunk=first, chunks=tuple(others), capacity=CAPACITY, tensorrt=section
    )


def build_real(
    out: Path,
    target: Path,
    drafter: Path | None,
    config: BuildConfig,
    progress: Progress | None = None,
) -> BuiltPackage:
    """Build the package `out`."""
    made = BuiltPackage(out)
    with building(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(builds, "engine_builder", lambda c, p: builder(made, c, p))
        build(target, drafter, out, config, progress or Silent())
    for one in made.engines.values():
        one.path = out / one.path.name
    return made


def build_hybrid(tmp: Path, dialect: Dialect, **more: Any) -> BuiltPackage:
    """Build a package of a small model of random weights, stored in `dialect`."""
    if not (tmp / "target").exists():
        write_target(tmp / "target", HYBRID, 1, dialect)
    return build_real(tmp / "package", tmp / "target", None, options(tmp, **more))


def plan_of(target: Path, drafter: Path | None, config: BuildConfig) -> EnginePlan:
    """Return the engines that a package would have, and their constants."""
    read = read_drafter(drafter) if drafter else None
    return plan_engines(material(make_plan(read_target(target), read, config)))


def build_engine(
    tmp: Path,
    together: EngineGraphs,
    constants: EngineConstants | None = None,
    meant: EngineGraphs | None = None,
    nodes: Iterable[PluginNode] | None = None,
    **more: Any,
) -> BuiltEngine:
    """Build one engine, with plugins for `nodes` (by default, of all its graphs), and check that it
    is what was `meant` (by default, those graphs).
    """
    made, path = BuiltPackage(tmp), tmp / f"{together.name}.plan"
    config = options(tmp, **more).tensorrt
    if constants is not None and any(graph.products for graph in together.graphs):
        constants.write(tmp, lambda count: None)
    every = [node for _, node in together.graphs[0].plugins]
    with building():
        by = builder(made, config, Silent())
        with by.calls(every if nodes is None else nodes):
            by.build(together, constants or EngineConstants(WeightFiles()), tmp, path)
            by.look(meant or together, path)
    return made.engines[together.name]


def builder(made: BuiltPackage, config: TensorRTConfig, progress: Progress) -> Any:
    """Return a builder of engines that keeps what it builds in `made`; within `building`."""
    from thor_dflash.builders.tensorrt.engine import TensorRTBuilder
    from thor_dflash.plugins.tensorrt.host import Messages

    class ReportKeeper(Messages):  # type: ignore[misc]
        report = ""

        def log(self, severity: Any, msg: str) -> None:
            if msg.startswith("Layers:"):
                self.report = msg
            super().log(severity, msg)

    class RtxBuilder(TensorRTBuilder):  # type: ignore[misc]
        def build(self, together: EngineGraphs, *rest: Any) -> None:
            start = time.perf_counter()
            super().build(together, *rest)
            one = BuiltEngine(together, rest[-1], seconds=time.perf_counter() - start)
            one.layers, one.tensors = read_report(self.messages.report)
            made.engines[together.name] = one

        def look(self, together: EngineGraphs, path: Path) -> list[InspectedLayer]:
            one = made.engines[together.name]
            self.judge(path.name, problems(one.tensors, one.layers, together))
            return one.layers

        def _config(self, builder: Any) -> Any:
            config = super()._config(builder)
            made.settings.append(_settings(config))
            return config

    return RtxBuilder(config, DEVICE, progress, ReportKeeper())


def _settings(config: Any) -> dict[str, Any]:
    trt = tensorrt()
    flags = trt.BuilderFlag.__members__
    return {
        "flags": {name for name, flag in flags.items() if config.get_flag(flag)},
        "workspace": config.get_memory_pool_limit(trt.MemoryPoolType.WORKSPACE),
        "verbosity": config.profiling_verbosity.name,
        "level": config.builder_optimization_level,
        "streams": config.max_aux_streams,
    }


# ---- what the builder logs ---------------------------------------------------------------------
_LAYER = re.compile(
    r"Name: (.*?), LayerType: (.*?), Inputs: \[(.*?)\], Constants: \[(.*?)\], Outputs: \[(.*?)\], "
    r"TacticName: (.*?), StreamId: \d+, Metadata: (.*)"
)
_TENSOR = re.compile(
    r"Name: (.*?), IOMode: (\w+), DataType: (\w+), Dimensions: .*, Location: (\w+), .*ProfileInfo: "
    r"\[ (.*)\]"
)
_SHAPES = re.compile(r"MinShape: \[(.*?)\], OptShape: \[(.*?)\], MaxShape: \[(.*?)\]")
_TYPES = {
    "Float": TensorProto.FLOAT,
    "BFloat16": TensorProto.BFLOAT16,
    "FP8": TensorProto.FLOAT8E4M3FN,
    "Int32": TensorProto.INT32,
}


def read_report(text: str) -> tuple[list[InspectedLayer], list[InspectedTensor]]:
    """Return the layers and tensors of an engine that the builder logged."""
    layers, _, tensors = text.partition("I/O Tensors:")
    lines = [line for line in layers.splitlines() if line.startswith("Name: ")]
    found = [_layer(line) for line in lines]
    ports = [line.strip() for line in tensors.splitlines() if line.strip().startswith("Name: ")]
    return found, [_tensor(line) for line in ports]


def _layer(line: str) -> InspectedLayer:
    match = _LAYER.fullmatch(line)
    assert match, line
    name, kind, reads, constants, writes, tactic, metadata = match.groups()
    names = re.compile(r"Name: (.*?), Dimensions")
    return InspectedLayer(
        name,
        kind,
        tactic,
        tuple(re.findall(r"\[ONNX Layer: ([^\]]*)\]", metadata)) or (name,),
        tuple(names.findall(reads)),
        tuple(names.findall(writes)),
        tuple(re.findall(r"Datatype: (\w+)", f"{reads} {constants}")),
    )


def _tensor(line: str) -> InspectedTensor:
    match = _TENSOR.fullmatch(line)
    assert match, line
    name, mode, kind, place, profiles = match.groups()
    shapes = [tuple(map(_shape, three)) for three in _SHAPES.findall(profiles)]
    return InspectedTensor(
        name,
        _TYPES.get(kind, 0),
        place == "Device",
        tuple(text == "kLINEAR" for text in re.findall(r"format \((\w+)\)", profiles)),
        tuple(shapes) if mode == "Input" else (),  # type: ignore[arg-type]
    )


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)
