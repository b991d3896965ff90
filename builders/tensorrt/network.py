"""Parses a deployment graph into a network, and checks that TensorRT did not change its meaning."""

# tensorrt is not installed where the checkers run: the tests check this file against its bindings.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUntypedBaseClass=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import onnx
import tensorrt as trt

from thor_dflash.builders.tensorrt.profiles import DYNAMIC, EngineGraphs, bounds, dims
from thor_dflash.builders.tensorrt.weight_constants import EngineConstants
from thor_dflash.core.errors import EngineError
from thor_dflash.plugins.contract import DOMAIN
from thor_dflash.plugins.tensorrt.host import Messages

TYPES: Mapping[int, trt.DataType] = {
    onnx.TensorProto.FLOAT: trt.DataType.FLOAT,
    onnx.TensorProto.BFLOAT16: trt.DataType.BF16,
    onnx.TensorProto.FLOAT8E4M3FN: trt.DataType.FP8,
    onnx.TensorProto.INT32: trt.DataType.INT32,
}
"""Element types of everything that a graph or a plugin reads or writes."""
LINEAR = 1 << int(trt.TensorFormat.LINEAR)
NAMED = 3
"""Most problems that one error message names."""


def parse(
    builder: trt.Builder,
    messages: Messages,
    together: EngineGraphs,
    constants: EngineConstants,
    directory: Path,
) -> tuple[trt.INetworkDefinition, list[object]]:
    """Return the network of a deployment graph, and objects to keep alive until its engine is
    built.

    Raises:
        EngineError: TensorRT refuses the graph, or changed its meaning.
    """
    flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(flags)
    network.name = together.name
    parser = trt.OnnxParser(network, messages)
    text = together.model.SerializeToString(deterministic=True)
    held: list[object] = [text]
    path = directory / f"{together.name}.onnx"
    read = parser.load_model_proto(text, str(path))
    for name, array in constants.mapped(together.model.graph, directory):
        held.append(array)
        read = read and parser.load_initializer(name, array.ctypes.data, array.nbytes)
    if not (read and parser.parse_model_proto()):
        messages.raise_failure()
        found = [str(parser.get_error(i)) for i in range(parser.num_errors)]
        raise EngineError(
            f"{together.name} must be a graph that TensorRT takes "
            f"(got: {'; '.join(found) or messages.why})"
        )
    if problems := list(_problems(network, together.model)):
        more = f", and {len(problems) - NAMED} more" if len(problems) > NAMED else ""
        raise EngineError(
            f"{together.name}: TensorRT must parse the graph as written "
            f"(got {', '.join(problems[:NAMED])}{more})"
        )
    _set_formats(network)
    # Last, because a list drops its last object first, and the arrays must outlive the parser.
    return network, [*held, parser]


def _set_formats(network: trt.INetworkDefinition) -> None:
    """Allow only row-major inputs and outputs: with DIRECT_IO, states are never reformatted."""
    for i in range(network.num_inputs):
        network.get_input(i).allowed_formats = LINEAR
    for i in range(network.num_outputs):
        network.get_output(i).allowed_formats = LINEAR


def _problems(network: trt.INetworkDefinition, model: onnx.ModelProto) -> Iterator[str]:
    graph = model.graph
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    outputs = [network.get_output(i) for i in range(network.num_outputs)]
    yield from _ports("input", inputs, graph.input)
    yield from _ports("output", outputs, graph.output)
    yield from (f"{t.name} read as a shape" for t in inputs if t.is_shape_tensor)
    yield from _plugins(network, graph)


def _ports(
    what: str, found: list[trt.ITensor], wanted: Iterable[onnx.ValueInfoProto]
) -> Iterator[str]:
    by_name = {tensor.name: tensor for tensor in found}
    infos = {v.name: v for v in wanted}
    for name in sorted(by_name.keys() ^ infos.keys()):
        yield f"{what} {name} {'too many' if name in by_name else 'missing'}"
    for name in sorted(by_name.keys() & infos.keys()):
        yield from _differences(f"{what} {name}", by_name[name], infos[name])


def _differences(what: str, tensor: trt.ITensor, info: onnx.ValueInfoProto) -> Iterator[str]:
    kind = info.type.tensor_type
    want = TYPES[kind.elem_type]
    if tensor.dtype != want:
        yield f"{what} of type {tensor.dtype}, not {want}"
    shape = dims(info)
    if tuple(tensor.shape) != shape:
        yield f"{what} of shape {tuple(tensor.shape)}, not {shape}"


def _plugins(network: trt.INetworkDefinition, graph: onnx.GraphProto) -> Iterator[str]:
    """Check that every custom node became one plugin layer, in order, with its own tensors. Its
    outputs are inputs of other nodes or of none: outputs of the graph, which `_ports` checks.
    """
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    plugins = [layer for layer in layers if layer.type == trt.LayerType.PLUGIN_V3]
    nodes = [node for node in graph.node if node.domain == DOMAIN]
    if len(plugins) != len(nodes):
        yield f"{len(plugins)} plugins of {len(nodes)} nodes"
        return
    if len(nodes) == len(graph.node) and len(layers) != len(plugins):
        extra = [layer.name for layer in layers if layer.type != trt.LayerType.PLUGIN_V3]
        yield f"layers that no node needs: {' '.join(extra[:NAMED])}"
    infos = {v.name: v for v in (*graph.input, *graph.output, *graph.value_info)}
    for layer, node in zip(plugins, nodes, strict=True):
        if (layer.num_inputs, layer.num_outputs) != (len(node.input), len(node.output)):
            yield f"{node.name} with {layer.num_inputs} inputs and {layer.num_outputs} outputs"
            continue
        for i, name in enumerate(node.input):
            yield from _differences(f"{node.name}: {name}", layer.get_input(i), infos[name])


def add_profiles(builder: trt.Builder, config: trt.IBuilderConfig, together: EngineGraphs) -> None:
    """Add the optimization profiles of an engine with dynamic sizes.

    Raises:
        EngineError: TensorRT refuses one.
    """
    chosen = [ranges for ranges in together.ranges if ranges]
    for number, ranges in enumerate(chosen):
        profile = builder.create_optimization_profile()
        for info in together.model.graph.input:
            if DYNAMIC in dims(info):
                least, best, most = bounds(info, ranges)
                profile.set_shape(info.name, least, best, most)
        if config.add_optimization_profile(profile) != number:
            raise EngineError(
                f"{together.name}: TensorRT must take profile {number} (got a refusal of {ranges})"
            )
