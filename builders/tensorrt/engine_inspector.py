"""Checks with TensorRT's inspector that an engine holds nothing that its graph does not.

TensorRT does not promise a stable format of the inspector's output. So little of it is used here,
and build.tensorrt.inspect = "note" accepts an engine in spite of problems.
"""

# tensorrt is not installed where the checkers run: the tests check this file against its bindings.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUntypedBaseClass=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import tensorrt as trt

from thor_dflash.builders.tensorrt.inspected_layer import InspectedLayer
from thor_dflash.builders.tensorrt.network import TYPES
from thor_dflash.builders.tensorrt.profiles import EngineGraphs
from thor_dflash.core import strict_records

REFORMAT = "Reformat"
"""How the type (or the name, if there is no type) of a layer that copies to another format begins.
"""
PLUGIN = "PluginV3"
FP4 = ("fp4", "e2m1")
"""Words in the name of a tactic that multiplies 4-bit floats."""


def layers(engine: trt.ICudaEngine) -> list[InspectedLayer]:
    """Return every layer of an engine, in order.

    Raises:
        ValueError: the inspector's report is no JSON.
    """
    inspector = engine.create_engine_inspector()
    text = inspector.get_engine_information(trt.LayerInformationFormat.JSON)
    table = strict_records.as_table(json.loads(text)) or {}
    return [_layer(row) for row in strict_records.as_list(table.get("Layers")) or []]


def _layer(row: object) -> InspectedLayer:
    table = strict_records.as_table(row)
    if table is None:
        return InspectedLayer(str(row), "", "")
    return InspectedLayer(
        str(table.get("Name", "")),
        str(table.get("LayerType", "")),
        str(table.get("TacticName", table.get("TacticValue", ""))),
    )


def problems(
    engine: trt.ICudaEngine, found: Sequence[InspectedLayer], together: EngineGraphs
) -> list[str]:
    """List the differences between an engine and its graph; empty if there are none."""
    return [*_bindings(engine, together), *_layers(found, together)]


def _bindings(engine: trt.ICudaEngine, together: EngineGraphs) -> Iterator[str]:
    graph = together.model.graph
    wanted = {v.name: TYPES[v.type.tensor_type.elem_type] for v in (*graph.input, *graph.output)}
    names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    for name in sorted({*names} ^ wanted.keys()):
        yield f"tensor {name} {'missing' if name in wanted else 'too many'}"
    for name in names:
        if name in wanted and engine.get_tensor_dtype(name) != wanted[name]:
            yield f"{name} of type {engine.get_tensor_dtype(name)}"
        if engine.get_tensor_location(name) != trt.TensorLocation.DEVICE:
            yield f"{name} in the host's memory"
        for profile in range(len(together.ranges)):
            if engine.get_tensor_format(name, profile) != trt.TensorFormat.LINEAR:
                yield f"{name} in another format than rows"


def _layers(found: Sequence[InspectedLayer], together: EngineGraphs) -> Iterator[str]:
    copies = [one.name for one in found if (one.kind or one.name).startswith(REFORMAT)]
    if copies:
        yield f"{len(copies)} copies into another format: {', '.join(copies[:3])}"
    nodes = sum(len(graph.plugins) for graph in together.graphs[:1])
    plugins = sum(one.kind == PLUGIN for one in found)
    if any(one.kind for one in found) and plugins not in (nodes, nodes * len(together.graphs)):
        yield f"{plugins} plugins of {nodes} nodes"
    products = together.graphs[0].products
    if products and not any(word in one.tactic.lower() for one in found for word in FP4):
        yield f"none of {products} linears multiplied in FP4"
