"""Builds the engines of a package: deploys, checks, builds and describes every graph.

Only `engine_builder` imports tensorrt. It is called before anything is written, so that a missing
TensorRT is reported at once.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import onnx

from thor_dflash.builders.graphs.graph_builder import GraphBuilder
from thor_dflash.builders.output.weight_files import WeightFiles
from thor_dflash.builders.tensorrt.dense_linears import DenseLinears
from thor_dflash.builders.tensorrt.deployment_graph import Deployment, deploy
from thor_dflash.builders.tensorrt.inspection import InspectedLayer
from thor_dflash.builders.tensorrt.profiles import EngineGraphs, SizeRange, gather
from thor_dflash.builders.tensorrt.weight_constants import EngineConstants
from thor_dflash.config.tensorrt import TensorRTConfig
from thor_dflash.core.errors import ConfigError, EngineError
from thor_dflash.core.progress import Progress
from thor_dflash.package import trt_engine as sidecar
from thor_dflash.package.launch_program import Program
from thor_dflash.package.manifest import CHUNK_STEPS, FileEntry
from thor_dflash.package.trt_engine import BuildEnvironment, EngineDescription, PluginCall
from thor_dflash.plugins.contract import NEXT
from thor_dflash.plugins.cuda.driver import Driver
from thor_dflash.plugins.tensorrt.node import fingerprint

if TYPE_CHECKING:
    from thor_dflash.builders.tensorrt.engine import TensorRTBuilder

LOG = "tensorrt.log"
"""File of TensorRT's warnings, in the package."""
ENGINE = ".plan"
"""Suffix of an engine's file."""
SCRATCH = ".scratch"
"""Temporary directory beside the engines while they are built."""


class PackageWriter(Protocol):
    """Takes the files of a package. See atomic_package.AtomicPackage."""

    def write(self, name: str, writer: Callable[[Path], None]) -> FileEntry:
        """Let `writer` write one file at the path passed to it."""
        ...


@dataclass(frozen=True, slots=True)
class EngineSources:
    """The inputs from which the engines of a package are built."""

    graphs: Sequence[GraphBuilder]
    programs: Sequence[Program]
    stored: WeightFiles
    """Weights as the checkpoints hold them."""
    scales: Mapping[str, float]
    """Stored weight -> Matrix.input_scale."""
    ranges: Mapping[str, SizeRange]
    """Ranges of the sizes that a session decides."""
    config: TensorRTConfig


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """The engines to build, and their constants."""

    together: Sequence[EngineGraphs]
    constants: EngineConstants


def engine_builder(config: TensorRTConfig, progress: Progress) -> TensorRTBuilder:
    """Return the builder of engines for this machine.

    Raises:
        EngineError: TensorRT is missing or too old, or there is no device.
    """
    try:
        from thor_dflash.builders.tensorrt.engine import TensorRTBuilder
    except ImportError as e:
        raise EngineError(
            "build.engine tensorrt must have TensorRT's Python package; on a Jetson it comes with "
            f"JetPack: python3 -m venv --system-site-packages (got: {e})"
        ) from e
    driver = Driver()
    try:
        return TensorRTBuilder(config, driver.info, progress)
    finally:
        driver.close()


def plan_engines(material: EngineSources) -> EnginePlan:
    """Decide which engines to build.

    Raises:
        ConfigError: an option does not fit the checkpoints, or a state is overwritten too early.
    """
    constants = EngineConstants(material.stored)
    made: list[Deployment] = []
    for graph, program in zip(material.graphs, material.programs, strict=True):
        made.append(deploy(program, _dense(material, graph, program, constants)))
    together = list(gather(made, material.ranges))
    for one in together:
        if problems := _shared_states(one):
            raise ConfigError(
                f"build.engine tensorrt must have graphs that change states safely "
                f"(got {one.name}: {'; '.join(problems[:3])})"
            )
    return EnginePlan(together, constants)


def _dense(
    material: EngineSources, graph: GraphBuilder, program: Program, constants: EngineConstants
) -> DenseLinears | None:
    """Return the rewriter of a prefill's linears to TensorRT's own, or None to keep our plugin."""
    who = material.config.prefill_linears
    if who == "plugin" or program.name.split(".")[0] != CHUNK_STEPS[0]:
        return None
    dense = DenseLinears(program, graph.proto().graph, constants, material.scales)
    missing = dense.unscaled()
    taken = any(dense.takes(step) for step in program.steps)
    if taken and not missing:
        return dense
    if who == "auto":
        return None
    lacks = "without an input_scale, or declared W4A16"
    what = f"{missing[0]} {lacks}" if missing else "no NVFP4 weight"
    raise ConfigError(
        "build.tensorrt.prefill_linears must be auto or plugin where the checkpoint has no scale "
        f"of the rows (got tensorrt, and {what})"
    )


def _shared_states(one: EngineGraphs) -> list[str]:
    """List states that are overwritten in place while another node may still read them."""
    return [
        f"{name} read by {count} nodes and written in place by one of them"
        for graph in one.graphs
        for counts in (_readers(graph.model),)
        for output in graph.in_place
        if (count := counts[name := output.removeprefix(NEXT)]) != 1
    ]


def _readers(model: onnx.ModelProto) -> Counter[str]:
    """Return how many nodes read each value."""
    return Counter(name for node in model.graph.node for name in set(node.input))


def write_engines(
    stage: PackageWriter, made: EnginePlan, by: TensorRTBuilder, progress: Progress
) -> None:
    """Write every engine, its description, and TensorRT's warnings.

    Raises:
        EngineError: TensorRT refuses a graph, or changed its meaning.
    """
    # An engine that several graphs share has the nodes of the first.
    nodes = [node for one in made.together for _, node in one.graphs[0].plugins]
    with by.calls(nodes):
        for one in made.together:
            file = f"{one.name}{ENGINE}"
            entry = stage.write(file, _engine_writer(one, made, by, progress))
            looked: list[InspectedLayer] = []
            for profile, graph in enumerate(one.graphs):
                writer = _sidecar_writer(one, profile, entry, by, looked)
                stage.write(f"{graph.name}{sidecar.ENDING}", writer)
    stage.write(LOG, lambda path: _write_log(path, by))


def _engine_writer(
    one: EngineGraphs, made: EnginePlan, by: TensorRTBuilder, progress: Progress
) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        scratch = path.with_name(SCRATCH)
        scratch.mkdir(exist_ok=True)
        try:
            if any(graph.products for graph in one.graphs):
                with progress.task("writing constants", made.constants.nbytes, "bytes") as task:
                    made.constants.write(scratch, task.advance)
            by.build(one, made.constants, scratch, path)
        finally:
            shutil.rmtree(scratch)

    return write


def _sidecar_writer(
    one: EngineGraphs,
    profile: int,
    entry: FileEntry,
    by: TensorRTBuilder,
    looked: list[InspectedLayer],
) -> Callable[[Path], None]:
    """Return the writer of a graph's description. `looked` caches the engine's layers: the first
    description of an engine fills it, and the others use it.
    """

    def write(path: Path) -> None:
        if not looked:
            looked.extend(by.look(one, path.with_name(f"{one.name}{ENGINE}")))
        description = describe(one, profile, entry, by, looked)
        path.write_text(sidecar.render(description), encoding="utf-8")

    return write


def describe(
    one: EngineGraphs,
    profile: int,
    entry: FileEntry,
    by: TensorRTBuilder,
    found: Sequence[InspectedLayer],
) -> EngineDescription:
    """Return the description of one graph's engine."""
    graph, info = one.graphs[profile], by.device
    return EngineDescription(
        name=graph.name,
        file=f"{one.name}{ENGINE}",
        sha256=entry.sha256,
        profile=profile,
        inputs=graph.inputs,
        outputs=graph.outputs,
        weights=graph.weights,
        in_place=graph.in_place,
        nodes=tuple(
            PluginCall(name=name, op=node.op, fields=node.fields())
            for name, node in one.graphs[0].plugins
        ),
        made=BuildEnvironment(
            tensorrt=by.version,
            capability=info.device.capability,
            device=info.name,
            multiprocessors=info.device.multiprocessors,
            kernels=fingerprint(),
            options=by.options,
        ),
        tactics={layer.name: f"{layer.kind} {layer.tactic}".strip() for layer in found},
    )


def _write_log(path: Path, by: TensorRTBuilder) -> None:
    path.write_text("".join(f"{line}\n" for line in by.warnings), encoding="utf-8")
