"""The network and ONNX parser classes of the recorder; see trt_recorder.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper
from stand_ins.trt_enums import (
    FAULTS,
    DataType,
    Dims,
    DimsExprs,
    IDimensionExpr,
    IExprBuilder,
    ILogger,
    LayerType,
    PluginField,
    PluginFieldCollection,
    PluginFieldType,
    TensorRTPhase,
    get_plugin_registry,
)

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
    """The node's ONNX operator."""
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
    """Initializers handed to the parser: name -> size, bytes."""
    declared: dict[str, tuple[int | str, ...]] = field(default_factory=dict)
    """Shapes as the graph declares them, with symbols."""

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
        self._network.initializers[name] = size
        return True

    def parse_model_proto(self) -> bool:
        assert self._model is not None
        graph = onnx.shape_inference.infer_shapes(self._model).graph
        known = self._declare(graph)
        tensors = {name: _tensor(name, known) for name in self._given(graph)}
        self._network.inputs += [tensors[v.name] for v in graph.input]
        for node in graph.node:
            layer = self._layer(node, [tensors[name] for name in node.input], known)
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

    def _given(self, graph: onnx.GraphProto) -> list[str]:
        for tensor in graph.initializer:
            if tensor.data_location == TensorProto.EXTERNAL:
                assert tensor.name in self._network.initializers, tensor.name
        return [v.name for v in (*graph.input, *graph.initializer)]

    def _declare(self, graph: onnx.GraphProto) -> dict[str, onnx.ValueInfoProto]:
        known = {v.name: v for v in (*graph.input, *graph.output, *graph.value_info)}
        for t in graph.initializer:
            known[t.name] = helper.make_tensor_value_info(t.name, t.data_type, t.dims)
        self._network.declared = {
            name: tuple(d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim)
            for name, v in known.items()
        }
        return known

    def _layer(
        self, node: onnx.NodeProto, inputs: list[ITensor], known: dict[str, onnx.ValueInfoProto]
    ) -> ILayer | None:
        given = {a.name: a for a in node.attribute}
        values = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        # TensorRT finds a plugin by operator type and the node's version and namespace attributes,
        # not by its ONNX domain.
        if "plugin_namespace" not in given:
            kind = LayerType.MATRIX_MULTIPLY if node.op_type == "MatMul" else LayerType.IDENTITY
            outputs = [_tensor(name, known) for name in node.output]
            return ILayer(node.name, kind, inputs, outputs, node.op_type, None, values)
        version, space = (values[n].decode() for n in ("plugin_version", "plugin_namespace"))
        creator = get_plugin_registry().get_creator(node.op_type, version, space)
        if creator is None:
            self._errors.append(f"Plugin not found: {node.op_type} {version} {space}")
            return None
        names = [f.name for f in creator.field_names]
        fields = PluginFieldCollection(_field(given[n]) for n in names if n in given)
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
