"""Builds an engine from a network, writes it to disk, and inspects it."""

# tensorrt is not installed where the checkers run: the tests check this file against its bindings.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUntypedBaseClass=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import tensorrt as trt

from thor_dflash.builders.tensorrt.build_progress import BuildProgress
from thor_dflash.builders.tensorrt.engine_file import EngineFileWriter
from thor_dflash.builders.tensorrt.engine_inspector import layers, tensors
from thor_dflash.builders.tensorrt.inspection import (
    FINDING,
    EngineFinding,
    InspectedLayer,
    problems,
)
from thor_dflash.builders.tensorrt.network import add_profiles, parse
from thor_dflash.builders.tensorrt.profiles import EngineGraphs
from thor_dflash.builders.tensorrt.weight_constants import EngineConstants
from thor_dflash.config.tensorrt import TensorRTConfig
from thor_dflash.core.errors import EngineError
from thor_dflash.core.progress import Progress
from thor_dflash.plugins.cuda.driver import DeviceInfo
from thor_dflash.plugins.tensorrt.host import Messages, Reader
from thor_dflash.plugins.tensorrt.node import PluginNode, fingerprint
from thor_dflash.plugins.tensorrt.plugin import deregister, register

LEAST = (10, 13)
"""First version of TensorRT with all features used here."""
MIB = 1 << 20


@dataclass(slots=True)
class TensorRTBuilder:
    """Builds engines one after another with one timing cache."""

    config: TensorRTConfig
    device: DeviceInfo
    progress: Progress
    messages: Messages = field(default_factory=Messages)

    def __post_init__(self) -> None:
        major, minor = trt.__version__.split(".")[:2]
        if (int(major), int(minor)) < LEAST:
            raise EngineError(
                f"build.engine tensorrt must have TensorRT {LEAST[0]}.{LEAST[1]} or later "
                f"(got {trt.__version__})"
            )

    @contextmanager
    def calls(self, nodes: Iterable[PluginNode]) -> Generator[None]:
        """Register the plugins of these nodes with TensorRT for the duration of the block. They
        launch no kernels.
        """
        registry = trt.get_plugin_registry()
        creators = register(registry, self.device.device, None, nodes, self.messages)
        try:
            yield
        finally:
            deregister(registry, creators)

    @property
    def version(self) -> str:
        """Version of TensorRT."""
        return str(trt.__version__)

    @property
    def options(self) -> dict[str, str]:
        """Build options, for an engine's description."""
        return {
            "workspace_mib": str(self.config.workspace_mib),
            "level": str(self.config.level),
            "flags": "DIRECT_IO MONITOR_MEMORY, no TF32, STRONGLY_TYPED",
        }

    @property
    def warnings(self) -> list[str]:
        """TensorRT's warnings."""
        return self.messages.lines

    def build(
        self, together: EngineGraphs, constants: EngineConstants, directory: Path, path: Path
    ) -> None:
        """Write the engine of some graphs at `path`; `directory` holds their constants.

        Raises:
            EngineError: TensorRT refuses a graph or fails to build it, or a plugin does; has the
                plugin's reason or TensorRT's messages.
            KeyboardInterrupt: Ctrl-C, from the main thread.
            OSError: the engine or the timing cache cannot be written.
        """
        self.messages.begin(together.name)
        with BuildProgress(together.name, self.progress) as phases:
            self._build(together, constants, directory, path, phases)

    def _build(
        self,
        together: EngineGraphs,
        constants: EngineConstants,
        directory: Path,
        path: Path,
        phases: BuildProgress,
    ) -> None:
        builder = trt.Builder(self.messages)
        network, held = parse(builder, self.messages, together, constants, directory)
        config = self._config(builder)
        add_profiles(builder, config, together)
        config.progress_monitor = phases
        with closing(EngineFileWriter(path)) as writer:
            done = builder.build_serialized_network_to_stream(network, config, writer)
        del held  # until here, TensorRT kept pointers to it
        self.messages.raise_failure()  # even if done: some failures go unnoticed
        if writer.failure is not None:
            raise writer.failure
        if not done:
            raise EngineError(f"{together.name} must build (got: {self.messages.why})")
        self._keep_timings(config)

    def look(self, together: EngineGraphs, path: Path) -> list[InspectedLayer]:
        """Return the layers of a built engine.

        Raises:
            EngineError: it does not load; or it differs from its graph, and build.tensorrt.inspect
                refuses that.
        """
        runtime, reader = trt.Runtime(self.messages), Reader(path)
        try:
            engine = runtime.deserialize_cuda_engine(reader)
        finally:
            reader.close()
        if engine is None:
            raise EngineError(f"{path.name} must load again (got: {self.messages.why})")
        found, findings = list[InspectedLayer](), list[EngineFinding]()
        try:
            found = layers(engine)
        except ValueError as e:
            findings.append(
                EngineFinding(f"a report of its layers that is no JSON ({e})", certain=False)
            )
        self.judge(path.name, [*findings, *problems(tensors(engine), found, together)])
        return found

    def judge(self, name: str, findings: Sequence[EngineFinding]) -> None:
        """Keep the findings about an engine.

        Raises:
            EngineError: build.tensorrt.inspect refuses one.
        """
        self.messages.lines += [f"{FINDING}{one.text}" for one in findings]
        how = self.config.inspect
        wrong = [one.text for one in findings if how == "refuse" or (how == "auto" and one.certain)]
        if wrong:
            raise EngineError(
                f"{name} must hold nothing that the graph does not (got {'; '.join(wrong)}); "
                f'build.tensorrt.inspect = "note" builds it nevertheless'
            )

    def _config(self, builder: trt.Builder) -> trt.IBuilderConfig:
        config = builder.create_builder_config()
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, self.config.workspace_mib * MIB)
        config.builder_optimization_level = self.config.level
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        config.max_aux_streams = 0  # a cycle's CUDA graph captures one stream only
        config.set_flag(trt.BuilderFlag.DIRECT_IO)
        config.set_flag(trt.BuilderFlag.MONITOR_MEMORY)
        config.clear_flag(trt.BuilderFlag.TF32)
        try:
            known = self._timings.read_bytes()
        except FileNotFoundError:
            known = b""
        # None if they are damaged, although the bindings' signature does not say so.
        timings: trt.ITimingCache | None = config.create_timing_cache(known)
        if timings is None or not config.set_timing_cache(timings, False):
            # Without a cache, TensorRT would have none to keep at the end.
            config.set_timing_cache(config.create_timing_cache(b""), False)
        return config

    @property
    def _timings(self) -> Path:
        """Path of the timing cache. Its name holds the properties of the device that a power mode
        changes, because TensorRT takes only timings of an equal device, and the fingerprint of the
        plugins' kernels, which TensorRT's own cache key does not cover.
        """
        device = self.device.device
        arch = f"sm_{device.capability[0]}{device.capability[1]}-{device.multiprocessors}"
        name = f"{self.version}-{arch}-{fingerprint()[:16]}.timing"
        return self.config.timings_directory / name

    def _keep_timings(self, config: trt.IBuilderConfig) -> None:
        path = self._timings
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(bytes(config.get_timing_cache().serialize()))
        Path(name).replace(path)
