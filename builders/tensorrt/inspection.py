"""What an engine holds, as TensorRT's inspector reports it, and how that differs from its graph.

The inspector's words are not documented. Those used here are the ones of TensorRT for RTX 1.7, the
only builder that these checks were run with (tests/trt); of TensorRT 10 and 11 they are unverified.
So a finding is certain only if the words around it were understood.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import onnx

from thor_dflash.builders.tensorrt.profiles import Bounds, EngineGraphs, bounds

FINDING = "INSPECTED: "
"""How a line of the package's tensorrt.log begins that has a finding of the inspection."""
PLUGIN = ("custom_layer", "PluginV3")
"""Types of a layer that is a plugin: of TensorRT for RTX, and as TensorRT 10 may report it."""
HARMLESS = ("shape_call",)
"""Types of layers that an engine may have besides those of its nodes; this one computes sizes."""
REFORMAT = "Reformat"
"""How the type (or the name, if there is no type) of a layer that copies to another format begins.
"""
FP4 = re.compile("fp4|e2m1", re.IGNORECASE)
"""4-bit floats, in the element type of an operand."""
NAMED = 3
"""Most names in one finding."""


@dataclass(frozen=True, slots=True)
class InspectedLayer:
    """One layer of an engine."""

    name: str
    kind: str = ""
    """Type of the layer; "" if the inspector reports only names."""
    tactic: str = ""
    """The tactic that TensorRT chose."""
    nodes: tuple[str, ...] = ()
    """The nodes of the graph that became this layer; its own name if the inspector has none."""
    inputs: tuple[str, ...] = ()
    """Names of the tensors that it reads."""
    outputs: tuple[str, ...] = ()
    operands: tuple[str, ...] = ()
    """Element types of its inputs and constants, in TensorRT's words."""


@dataclass(frozen=True, slots=True)
class InspectedTensor:
    """An input or output of an engine."""

    name: str
    elem_type: int
    """Of onnx.TensorProto; 0 for a type that no graph of ours has."""
    on_device: bool
    linear: tuple[bool, ...]
    """For each profile, whether it is stored row by row."""
    shapes: tuple[Bounds, ...] = ()
    """For each profile, the shapes that an input may have; empty for an output."""


@dataclass(frozen=True, slots=True)
class EngineFinding:
    """A difference between an engine and its graph."""

    text: str
    certain: bool = True
    """Whether it is one if TensorRT uses words that are unknown here."""


def problems(
    tensors: Sequence[InspectedTensor], found: Sequence[InspectedLayer], together: EngineGraphs
) -> list[EngineFinding]:
    """List the differences between an engine and its graph; empty if there are none."""
    return [*map(EngineFinding, _ports(tensors, together)), *_layers(found, together)]


def _ports(tensors: Sequence[InspectedTensor], together: EngineGraphs) -> Iterator[str]:
    graph = together.model.graph
    wanted = {v.name: v for v in (*graph.input, *graph.output)}
    for name in sorted({t.name for t in tensors} ^ wanted.keys()):
        yield f"tensor {name} {'missing' if name in wanted else 'too many'}"
    inputs = {v.name for v in graph.input}
    for tensor in (t for t in tensors if t.name in wanted):
        info = wanted[tensor.name]
        if tensor.elem_type != info.type.tensor_type.elem_type:
            yield f"{tensor.name} of another type"
        if not tensor.on_device:
            yield f"{tensor.name} in the host's memory"
        if not all(tensor.linear):
            yield f"{tensor.name} in another format than rows"
        planned = tuple(bounds(info, ranges) for ranges in together.ranges)
        if tensor.name in inputs and tensor.shapes != planned:
            yield f"{tensor.name} of shapes {tensor.shapes}, not {planned}"


def _layers(found: Sequence[InspectedLayer], together: EngineGraphs) -> Iterator[EngineFinding]:
    """Yield what differs between an engine's layers and its graph."""
    copies = [one.name for one in found if (one.kind or one.name).startswith(REFORMAT)]
    if copies:
        yield EngineFinding(f"{len(copies)} copies into another format: {_some(copies)}")
    nodes = {name for name, _ in together.graphs[0].plugins}
    ours = [one for one in found if nodes.intersection(one.nodes)]
    times = Counter(node for one in ours for node in one.nodes)
    sets = len(together.graphs)  # each profile has layers of its own, or all share them
    if all(times[node] <= 1 for node in nodes):
        sets = 1
    if ours:
        yield from _plugins(ours, {node: times[node] for node in sorted(nodes)}, sets)
        yield from _tensors(found, together.model.graph)
    elif nodes:
        yield EngineFinding(
            f"none of {len(nodes)} custom nodes among {len(found)} layers", certain=False
        )
    if ours and not together.graphs[0].products:
        yield from _others([one for one in found if one not in ours])
    yield from _products(found, together.graphs[0].products, sets)


def _plugins(
    ours: Sequence[InspectedLayer], times: Mapping[str, int], sets: int
) -> Iterator[EngineFinding]:
    """Check that every custom node is a layer in every set of layers, alone in it, and a plugin."""
    wrong = [node for node, count in times.items() if count != sets]
    if wrong:
        yield EngineFinding(
            f"{len(times) - len(wrong)} plugins of {len(times)} nodes: {_some(wrong)}"
        )
    fused = [one.name for one in ours if len(one.nodes) > 1]
    if fused:
        yield EngineFinding(f"plugins fused with other nodes: {_some(fused)}")
    for one in ours:
        if one.kind and one.kind not in PLUGIN:
            yield EngineFinding(f"{one.name} of type {one.kind}, not a plugin's", certain=False)


def _others(found: Sequence[InspectedLayer]) -> Iterator[EngineFinding]:
    """Yield the layers without a node, in an engine whose nodes are all custom."""
    for one in found:
        if one.kind not in HARMLESS and not one.kind.startswith(REFORMAT):
            yield EngineFinding(f"{one.name} of type {one.kind}, of no node", certain=False)


def _tensors(found: Sequence[InspectedLayer], graph: onnx.GraphProto) -> Iterator[EngineFinding]:
    """Check that inputs and outputs of the graph, the states among them, are read and written by
    the layers of its nodes alone, so that no layer copies them.
    """
    readers, writers = _users(graph, "input"), _users(graph, "output")
    wrong = [
        f"{name} by {one.name}"
        for one in found
        for names, users in ((one.inputs, readers), (one.outputs, writers))
        for name in names
        if name in users and not users[name].intersection(one.nodes)
    ]
    if wrong:
        yield EngineFinding(f"{len(wrong)} tensors copied: {_some(wrong)}")
    touched = {name for one in found for name in (*one.inputs, *one.outputs)}
    lost = sorted((readers.keys() | writers.keys()) - touched)
    if lost and touched:
        yield EngineFinding(f"{len(lost)} tensors used by no layer: {_some(lost)}", certain=False)


def _users(graph: onnx.GraphProto, port: Literal["input", "output"]) -> dict[str, set[str]]:
    """Return the nodes that read each input of the graph, or write each output."""
    outside = {v.name for v in (graph.input if port == "input" else graph.output)}
    users: dict[str, set[str]] = {}
    for node in graph.node:
        for name in outside.intersection(node.input if port == "input" else node.output):
            users.setdefault(name, set()).add(node.name)
    return users


def _products(
    found: Sequence[InspectedLayer], products: Sequence[str], sets: int
) -> Iterator[EngineFinding]:
    """Check that every product of 4-bit floats is computed as one: both of its operands are. Layers
    that prepare an operand may have the node's name, too.
    """
    layers: dict[str, list[InspectedLayer]] = {name: [] for name in products}
    for one in found:
        for name in layers.keys() & {*one.nodes}:
            layers[name].append(one)
    wide = [name for name in products if sum(map(_in_fp4, layers[name])) != sets]
    if wide:
        what = f"{len(wide)} of {len(products)} products of 4-bit floats computed in another type"
        # If none is recognised, it is rather the words.
        yield EngineFinding(f"{what}: {_some(wide)}", certain=len(wide) < len(products))


def _in_fp4(layer: InspectedLayer) -> bool:
    return sum(bool(FP4.search(kind)) for kind in layer.operands) >= 2


def _some(names: Sequence[str]) -> str:
    more = f", and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}"
