"""A stand-in for the module `tensorrt` that keeps what is asked of its builder and parser.

It has the classes, methods and words that our code uses and no others (test_stubs.py holds them
against TensorRT's bindings). The parser makes plugin layers as TensorRT's does, by asking the
registered creators; of standard nodes it keeps the type alone. Nothing is computed, and what it
lets pass TensorRT may refuse.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper

__version__ = "10.13.3.9"

DOMAIN = "thor_dflash"


class DataType(IntEnum):
    FLOAT = 0
    HALF = 1
    INT8 = 2
    INT32 = 3
    BOOL = 4
    UINT8 = 5
    FP8 = 6
    BF16 = 7
    INT64 = 8
    INT4 = 9
    FP4 = 10


class TensorFormat(IntEnum):
    LINEAR = 0
    CHW32 = 5


class LayerType(IntEnum):
    CONSTANT = 0
    PLUGIN_V3 = 1
    MATRIX_MULTIPLY = 2
    IDENTITY = 3


class NetworkDefinitionCreationFlag(IntEnum):
    EXPLICIT_BATCH = 0
    STRONGLY_TYPED = 1


class MemoryPoolType(IntEnum):
    WORKSPACE = 0


class BuilderFlag(IntEnum):
    TF32 = 7
    DIRECT_IO = 11
    MONITOR_MEMORY = 23


class ProfilingVerbosity(IntEnum):
    LAYER_NAMES_ONLY = 0
    NONE = 1
    DETAILED = 2


class LayerInformationFormat(IntEnum):
    ONELINE = 0
    JSON = 1


class TensorLocation(IntEnum):
    DEVICE = 0
    HOST = 1


class SeekPosition(IntEnum):
    SET = 0
    CUR = 1
    END = 2


class PluginFieldType(IntEnum):
    FLOAT16 = 0
    FLOAT32 = 1
    INT32 = 5
    CHAR = 6


class PluginCapabilityType(IntEnum):
    CORE = 0
    BUILD = 1
    RUNTIME = 2


class TensorRTPhase(IntEnum):
    BUILD = 0
    RUNTIME = 1


TYPES = {
    TensorProto.FLOAT: DataType.FLOAT,
    TensorProto.FLOAT16: DataType.HALF,
    TensorProto.BFLOAT16: DataType.BF16,
    TensorProto.FLOAT8E4M3FN: DataType.FP8,
    TensorProto.FLOAT4E2M1: DataType.FP4,
    TensorProto.INT32: DataType.INT32,
    TensorProto.INT64: DataType.INT64,
    TensorProto.UINT8: DataType.UINT8,
    TensorProto.BOOL: DataType.BOOL,
}


class ILogger:
    class Severity(IntEnum):
        INTERNAL_ERROR = 0
        ERROR = 1
        WARNING = 2
        INFO = 3
        VERBOSE = 4


class IProgressMonitor:
    pass


class IStreamWriter:
    pass


class IStreamReaderV2:
    pass


# ---- plugins ----------------------------------------------------------------------------------


class IPluginV3:
    pass


class IPluginV3OneCore:
    pass


class IPluginV3OneBuild:
    pass


class IPluginV3OneRuntime:
    pass


class IPluginCreatorV3One:
    pass


class IPluginResourceContext:
    pass


@dataclass
class PluginField:
    name: str = ""
    data: Any = None
    type: PluginFieldType = PluginFieldType.INT32


class PluginFieldCollection(list):
    pass


@dataclass
class IDimensionExpr:
    value: int
    """-1: decided when it runs."""

    def is_constant(self) -> bool:
        return self.value >= 0

    def get_constant_value(self) -> int:
        return self.value


class IExprBuilder:
    def constant(self, value: int) -> IDimensionExpr:
        return IDimensionExpr(value)


class DimsExprs(list):
    pass


class Dims(tuple):
    pass


@dataclass
class PluginTensorDesc:
    dims: Dims
    type: DataType
    format: TensorFormat = TensorFormat.LINEAR


@dataclass
class DynamicPluginTensorDesc:
    desc: PluginTensorDesc
    min: Dims
    max: Dims
    opt: Dims


class IPluginRegistry:
    def __init__(self) -> None:
        self.creators: dict[tuple[str, str, str], Any] = {}

    def register_creator(self, creator: Any, plugin_namespace: str = "") -> bool:
        key = (creator.name, creator.plugin_version, plugin_namespace)
        fresh = key not in self.creators
        self.creators[key] = creator
        return fresh

    def deregister_creator(self, creator: Any) -> bool:
        found = [key for key, one in self.creators.items() if one is creator]
        for key in found:
            del self.creators[key]
        return bool(found)

    def get_creator(self, type: str, version: str, plugin_namespace: str = "") -> Any:
        return self.creators.get((type, version, plugin_namespace))


_REGISTRY = IPluginRegistry()


def get_plugin_registry() -> IPluginRegistry:
    return _REGISTRY


# ---- networks ---------------------------------------------------------------------------------


@dataclass(eq=False)
class ITensor:
    name: str
    dtype: DataType | None
    shape: Dims
    is_shape_tensor: bool = False
    allowed_formats: int = 0


@dataclass(eq=False)
class ILayer:
    name: str
    type: LayerType
    inputs: list[ITensor]
    outputs: list[ITensor]
    kind: str
    """ONNX type."""
    plugin: Any = None
    fields: dict[str, Any] = field(default_factory=dict)
    """All attributes of the node."""

    @property
    def num_inputs(self) -> int:
        return len(self.inputs)

    @property
    def num_outputs(self) -> int:
        return len(self.outputs)

    def get_input(self, index: int) -> ITensor:
        return self.inputs[index]

    def get_output(self, index: int) -> ITensor:
        return self.outputs[index]


@dataclass(eq=False)
class INetworkDefinition:
    flags: int
    name: str = ""
    inputs: list[ITensor] = field(default_factory=list)
    outputs: list[ITensor] = field(default_factory=list)
    layers: list[ILayer] = field(default_factory=list)
    initializers: dict[str, int] = field(default_factory=dict)
    """Handed over: name -> bytes."""
    declared: dict[str, tuple[int | str, ...]] = field(default_factory=dict)
    """Shapes as the graph declares them, with letters."""

    @property
    def num_inputs(self) -> int:
        return len(self.inputs)

    @property
    def num_outputs(self) -> int:
        return len(self.outputs)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def get_input(self, index: int) -> ITensor:
        return self.inputs[index]

    def get_output(self, index: int) -> ITensor:
        return self.outputs[index]

    def get_layer(self, index: int) -> ILayer:
        return self.layers[index]


class OnnxParser:
    def __init__(self, network: INetworkDefinition, logger: ILogger) -> None:
        self._network = network
        self._logger = logger
        self._errors: list[str] = []
        self._model: onnx.ModelProto | None = None

    @property
    def num_errors(self) -> int:
        return len(self._errors)

    def get_error(self, index: int) -> str:
        return self._errors[index]

    def load_model_proto(self, model: bytes, path: str | None = None) -> bool:
        del path
        self._model = onnx.ModelProto()
        self._model.ParseFromString(model)
        return True

    def load_initializer(self, name: str, data: int, size: int) -> bool:
        assert self._model is not None
        [tensor] = [t for t in self._model.graph.initializer if t.name == name]
        length = next(int(e.value) for e in tensor.external_data if e.key == "length")
        if length != size:
            return False
        ctypes.string_at(data, 1)  # it is there
        self._network.initializers[name] = size
        return True

    def parse_model_proto(self) -> bool:
        assert self._model is not None
        graph = onnx.shape_inference.infer_shapes(self._model).graph
        known = {v.name: v for v in (*graph.input, *graph.output, *graph.value_info)}
        for tensor in graph.initializer:
            if tensor.data_location == TensorProto.EXTERNAL:
                assert tensor.name in self._network.initializers, tensor.name
            known[tensor.name] = helper.make_tensor_value_info(
                tensor.name, tensor.data_type, tensor.dims
            )
        self._network.declared = {
            name: tuple(d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim)
            for name, v in known.items()
        }
        tensors: dict[str, ITensor] = {}
        for v in graph.input:
            tensors[v.name] = _tensor(v.name, known)
            self._network.inputs.append(tensors[v.name])
        for tensor in graph.initializer:
            tensors[tensor.name] = _tensor(tensor.name, known)
        for node in graph.node:
            inputs = [tensors[name] for name in node.input]
            layer = self._layer(node, inputs, known)
            if layer is None:
                return False
            tensors |= {t.name: t for t in layer.outputs}
            self._network.layers.append(layer)
        self._network.outputs += [tensors[v.name] for v in graph.output]
        if "shape" in FAULTS:
            tensors[graph.output[0].name].shape = Dims((7,))
        if "extra" in FAULTS:
            self._network.layers.append(ILayer("Cast.x", LayerType.IDENTITY, [], [], "Cast"))
        return True

    def _layer(
        self, node: onnx.NodeProto, inputs: list[ITensor], known: dict[str, onnx.ValueInfoProto]
    ) -> ILayer | None:
        given = {a.name: a for a in node.attribute}
        values = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        # As TensorRT's: by type, version and namespace on the node; the domain is not asked here.
        if "plugin_namespace" not in given:
            kind = LayerType.MATRIX_MULTIPLY if node.op_type == "MatMul" else LayerType.IDENTITY
            outputs = [_tensor(name, known) for name in node.output]
            return ILayer(node.name, kind, inputs, outputs, node.op_type, None, values)
        version, space = (values[n].decode() for n in ("plugin_version", "plugin_namespace"))
        creator = _REGISTRY.get_creator(node.op_type, version, space)
        if creator is None:
            self._errors.append(f"Plugin not found: {node.op_type} {version} {space}")
            return None
        asked = [f.name for f in creator.field_names]
        fields = PluginFieldCollection(_field(given[n]) for n in asked if n in given)
        plugin = creator.create_plugin(node.name, fields, TensorRTPhase.BUILD)
        types = plugin.get_output_data_types([t.dtype for t in inputs])
        exprs = [DimsExprs(map(IDimensionExpr, t.shape)) for t in inputs]
        shapes = plugin.get_output_shapes(exprs, [], IExprBuilder())
        assert len(types) == len(shapes) == plugin.num_outputs == len(node.output), node.name
        outputs = [
            ITensor(name, dtype, Dims(e.value for e in shape))
            for name, dtype, shape in zip(node.output, types, shapes, strict=True)
        ]
        kind = LayerType.PLUGIN_V3
        return ILayer(node.name, kind, inputs, outputs, node.op_type, plugin, values)


def _tensor(name: str, known: dict[str, onnx.ValueInfoProto]) -> ITensor:
    if name not in known:
        return ITensor(name, None, Dims())
    kind = known[name].type.tensor_type
    shape = Dims(-1 if d.dim_param else d.dim_value for d in kind.shape.dim)
    return ITensor(name, TYPES[kind.elem_type], shape)


def _field(a: onnx.AttributeProto) -> PluginField:
    if a.type == AttributeProto.INT:
        return PluginField(a.name, np.array([a.i], np.int32), PluginFieldType.INT32)
    if a.type == AttributeProto.FLOAT:
        return PluginField(a.name, np.array([a.f], np.float32), PluginFieldType.FLOAT32)
    text = np.frombuffer(a.s + b"\0", np.int8)
    return PluginField(a.name, text, PluginFieldType.CHAR)


# ---- building ---------------------------------------------------------------------------------


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

    def create_timing_cache(self, serialized_timing_cache: bytes) -> ITimingCache:
        return ITimingCache(serialized_timing_cache)

    def set_timing_cache(self, cache: ITimingCache, ignore_mismatch: bool) -> bool:
        self.cache, self.ignore_mismatch = cache, ignore_mismatch
        return True

    def get_timing_cache(self) -> ITimingCache:
        assert self.cache is not None
        return self.cache

    def add_optimization_profile(self, profile: IOptimizationProfile) -> int:
        self.profiles.append(profile)
        return -1 if "profile" in FAULTS else len(self.profiles) - 1


@dataclass
class Built:
    """What a builder was asked for."""

    network: INetworkDefinition
    config: IBuilderConfig
    workspaces: dict[str, int]
    """Layer -> bytes, at the largest sizes of all profiles."""


BUILT: list[Built] = []
"""In order. Tests empty it."""
FAULTS: set[str] = set()
"""What goes wrong: "build" at all; the inspector shows a "reformat", another "type", other "layers"
or no "fp4"; the engine is "empty"; the parser makes another "shape" or an "extra" layer; a "profile"
is refused."""
PIECE = 1 << 12


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
        needs = {
            layer.name: max(_workspace(layer, network, p) for p in config.profiles)
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
    monitor.phase_start("Building Engine", None, 2)
    monitor.phase_start("Timing", "Building Engine", 1)
    monitor.phase_start("Timing one", "Timing", 1)
    going = monitor.step_complete("Timing", 0) and monitor.step_complete("Building Engine", 0)
    for name in ("Timing one", "Timing", "Building Engine"):
        monitor.phase_finish(name)
    return going


def _workspace(layer: ILayer, network: INetworkDefinition, profile: IOptimizationProfile) -> int:
    """Ask a plugin what TensorRT asks: formats first, then memory."""
    sizes: dict[str, tuple[int, int, int]] = {}
    for name, three in profile.shapes.items():
        for letter, *each in zip(network.declared[name], *three, strict=True):
            if isinstance(letter, str):
                assert sizes.setdefault(letter, tuple(each)) == tuple(each), letter
    descs = [_desc(t, network.declared[t.name], sizes) for t in (*layer.inputs, *layer.outputs)]
    for pos in range(len(descs)):
        fits = layer.plugin.supports_format_combination(pos, descs, layer.num_inputs)
        assert fits, (layer.name, pos, descs[pos])
    ins, outs = descs[: layer.num_inputs], descs[layer.num_inputs :]
    layer.plugin.configure_plugin(ins, outs)
    return int(layer.plugin.get_workspace_size(ins, outs))


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
    fp4 = layer.kind == "MatMul" and "fp4" not in FAULTS
    return "gemm_e2m1" if fp4 else layer.kind


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
