"""A stand-in for the module `tensorrt` that records what our code asks of its builder and parser.

It has the classes, methods and enumerations that our code uses and no others. The parser makes
plugin layers as TensorRT's does, by asking the registered creators; of a standard node it keeps
type, attributes and declared tensors. Nothing is computed, and TensorRT may refuse what this
accepts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stand_ins.trt_enums import *
from stand_ins.trt_enums import (
    FAULTS,
    BuilderFlag,
    DataType,
    Dims,
    DynamicPluginTensorDesc,
    ILogger,
    IStreamWriter,
    LayerInformationFormat,
    MemoryPoolType,
    PluginTensorDesc,
    ProfilingVerbosity,
    SeekPosition,
    TensorFormat,
    TensorLocation,
)
from stand_ins.trt_parser import *
from stand_ins.trt_parser import ILayer, INetworkDefinition, ITensor

__version__ = "10.13.3.9"


class IOptimizationProfile:
    def __init__(self) -> None:
        self.shapes: dict[str, tuple[Dims, Dims, Dims]] = {}

    def set_shape(
        self, input: str, min: Sequence[int], opt: Sequence[int], max: Sequence[int]
    ) -> None:
        self.shapes[input] = (Dims(min), Dims(opt), Dims(max))


class IHostMemory(bytes):
    pass


class ITimingCache:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def serialize(self) -> IHostMemory:
        return IHostMemory(self.data + b"+")


class IBuilderConfig:
    def __init__(self) -> None:
        self.builder_optimization_level = 3
        self.profiling_verbosity = ProfilingVerbosity.LAYER_NAMES_ONLY
        self.max_aux_streams = -1
        self.progress_monitor: Any = None
        self.flags = {BuilderFlag.TF32}
        self.pools: dict[MemoryPoolType, int] = {}
        self.profiles: list[IOptimizationProfile] = []
        self.cache: ITimingCache | None = None
        self.ignore_mismatch = True

    def set_memory_pool_limit(self, pool: MemoryPoolType, pool_size: int) -> None:
        self.pools[pool] = pool_size

    def set_flag(self, flag: BuilderFlag) -> None:
        self.flags.add(flag)

    def clear_flag(self, flag: BuilderFlag) -> None:
        self.flags.discard(flag)

    def create_timing_cache(self, serialized_timing_cache: bytes) -> ITimingCache | None:
        return ITimingCache(serialized_timing_cache)

    def set_timing_cache(self, cache: ITimingCache, ignore_mismatch: bool) -> bool:
        self.cache, self.ignore_mismatch = cache, ignore_mismatch
        return True

    def get_timing_cache(self) -> ITimingCache | None:
        return self.cache

    def add_optimization_profile(self, profile: IOptimizationProfile) -> int:
        self.profiles.append(profile)
        return -1 if "profile" in FAULTS else len(self.profiles) - 1


@dataclass
class Built:
    """The calls of a builder."""

    network: INetworkDefinition
    config: IBuilderConfig
    workspaces: dict[str, int]
    """Layer -> bytes, at the largest sizes of all profiles."""


BUILT: list[Built] = []
"""The engines built so far, in order. Tests clear it."""
PIECE = 1 << 12
"""Bytes of an engine that are written or read at a time."""


class Builder:
    def __init__(self, logger: ILogger) -> None:
        self.logger = logger

    def create_network(self, flags: int = 0) -> INetworkDefinition:
        return INetworkDefinition(flags)

    def create_builder_config(self) -> IBuilderConfig:
        return IBuilderConfig()

    def create_optimization_profile(self) -> IOptimizationProfile:
        return IOptimizationProfile()

    def build_serialized_network_to_stream(
        self, network: INetworkDefinition, config: IBuilderConfig, writer: IStreamWriter
    ) -> bool:
        if "build" in FAULTS:
            self.logger.log(ILogger.Severity.ERROR, "no tactic for a layer")
            return False
        if not _report(config.progress_monitor):
            return False
        profiles = config.profiles or [IOptimizationProfile()]
        needs = {
            layer.name: max(_workspace(layer, network, p) for p in profiles)
            for layer in network.layers
            if layer.plugin is not None
        }
        BUILT.append(Built(network, config, needs))
        if "empty" in FAULTS:
            return True
        data = json.dumps(_plan(network)).encode()
        return all(
            writer.write(data[i : i + PIECE]) == len(data[i : i + PIECE])
            for i in range(0, len(data), PIECE)
        )


def _report(monitor: Any) -> bool:
    try:
        monitor.phase_start("Building Engine", None, 2)
        monitor.phase_start("Timing", "Building Engine", 1)
        monitor.phase_start("Timing one", "Timing", 1)
        going = monitor.step_complete("Timing", 0) and monitor.step_complete("Building Engine", 0)
        for name in ("Timing one", "Timing", "Building Engine"):
            monitor.phase_finish(name)
    except BaseException as e:
        raise AssertionError("no exception may cross TensorRT's frames") from e
    return going


def _workspace(layer: ILayer, network: INetworkDefinition, profile: IOptimizationProfile) -> int:
    """Returns a plugin's workspace, bytes, requested as TensorRT does: after the formats."""
    sizes: dict[str, tuple[int, int, int]] = {}
    for name, three in profile.shapes.items():
        for symbol, *each in zip(network.declared[name], *three, strict=True):
            if isinstance(symbol, str):
                assert sizes.setdefault(symbol, tuple(each)) == tuple(each), symbol
    descs = [_desc(t, network.declared[t.name], sizes) for t in (*layer.inputs, *layer.outputs)]
    for pos in range(len(descs)):
        formats = [_formats(d, known=at <= pos) for at, d in enumerate(descs)]
        fits = layer.plugin.supports_format_combination(pos, formats, layer.num_inputs)
        assert fits, (layer.name, pos, descs[pos])
    ins, outs = descs[: layer.num_inputs], descs[layer.num_inputs :]
    layer.plugin.configure_plugin(ins, outs)
    _time(layer.plugin.clone(), ins, outs)
    return int(layer.plugin.get_workspace_size(ins, outs))


def _time(
    plugin: Any, ins: list[DynamicPluginTensorDesc], outs: list[DynamicPluginTensorDesc]
) -> None:
    """Runs a plugin as TensorRT does to time it: on inputs whose values mean nothing."""
    each = [[PluginTensorDesc(d.opt, d.desc.type) for d in descs] for descs in (ins, outs)]
    plugin.on_shape_change(*each)
    plugin.enqueue(*each, [1 << 40] * len(ins), [1 << 41] * len(outs), 1 << 42, 7)


def _formats(described: DynamicPluginTensorDesc, *, known: bool) -> DynamicPluginTensorDesc:
    """Returns what is known of a tensor while formats are chosen: only those of it and of the
    tensors before it, and no bounds of its sizes, which differ between profiles.
    """
    kind = described.desc.type if known else None
    return DynamicPluginTensorDesc(PluginTensorDesc(described.desc.dims, kind), *[Dims()] * 3)


def _desc(
    tensor: ITensor, shape: tuple[int | str, ...], sizes: dict[str, tuple[int, int, int]]
) -> DynamicPluginTensorDesc:
    least, best, most = (
        Dims(sizes[n][i] if isinstance(n, str) else n for n in shape) for i in range(3)
    )
    return DynamicPluginTensorDesc(PluginTensorDesc(tensor.shape, tensor.dtype), least, most, best)


def _plan(network: INetworkDefinition) -> dict[str, Any]:
    layers = [
        {
            "Name": layer.name,
            "LayerType": "PluginV3" if layer.plugin is not None else layer.kind,
            "TacticName": "" if layer.plugin is not None else _tactic(layer),
        }
        for layer in network.layers
    ]
    if "reformat" in FAULTS:
        layers.append({"Name": "Reformatting CopyNode for x", "LayerType": "Reformat"})
    if "layers" in FAULTS:
        layers.pop(0)
    tensors = [{"name": t.name, "type": int(t.dtype)} for t in (*network.inputs, *network.outputs)]
    if "type" in FAULTS:
        tensors[0]["type"] = int(DataType.HALF)
    return {"Layers": layers, "tensors": tensors}


def _tactic(layer: ILayer) -> str:
    if layer.kind != "MatMul":
        return ""
    return "gemm_f16" if "fp4" in FAULTS else "gemm_e2m1"


class EngineInspector:
    def __init__(self, plan: dict[str, Any]) -> None:
        self._plan = plan

    def get_engine_information(self, format: LayerInformationFormat) -> str:
        assert format == LayerInformationFormat.JSON
        return json.dumps({"Layers": self._plan["Layers"], "Bindings": []})


class ICudaEngine:
    def __init__(self, plan: dict[str, Any]) -> None:
        self._plan = plan
        self._tensors = {t["name"]: t for t in plan["tensors"]}

    @property
    def num_io_tensors(self) -> int:
        return len(self._tensors)

    def get_tensor_name(self, index: int) -> str:
        return list(self._tensors)[index]

    def get_tensor_dtype(self, name: str) -> DataType:
        return DataType(self._tensors[name]["type"])

    def get_tensor_format(self, name: str, profile_index: int = 0) -> TensorFormat:
        return TensorFormat.LINEAR

    def get_tensor_location(self, name: str) -> TensorLocation:
        return TensorLocation.DEVICE

    def create_engine_inspector(self) -> EngineInspector:
        return EngineInspector(self._plan)


class Runtime:
    def __init__(self, logger: ILogger) -> None:
        self.logger = logger

    def deserialize_cuda_engine(self, stream_reader_v2: Any) -> ICudaEngine | None:
        data = b""
        stream_reader_v2.seek(0, SeekPosition.SET)
        while piece := stream_reader_v2.read(PIECE, 0):
            data += piece
        if not data:
            return None
        return ICudaEngine(json.loads(data))
