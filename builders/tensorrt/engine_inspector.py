"""Reads what an engine holds, with TensorRT's inspector and from its own description."""

# tensorrt is not installed where the checkers run: the tests check this file against its bindings.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUntypedBaseClass=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import json
import re
from collections.abc import Mapping

import tensorrt as trt

from thor_dflash.builders.tensorrt.inspection import InspectedLayer, InspectedTensor
from thor_dflash.builders.tensorrt.network import TYPES
from thor_dflash.builders.tensorrt.profiles import Bounds
from thor_dflash.core import strict_records

NODE = re.compile(r"\[ONNX Layer: ([^\]]*)\]")
"""A node of the graph, in the metadata of a layer."""


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
        return InspectedLayer(str(row), nodes=(str(row),))
    name = str(table.get("Name", ""))
    ports = {
        key: [strict_records.as_table(port) or {} for port in strict_records.as_list(value) or []]
        for key, value in table.items()
        if key in ("Inputs", "Outputs", "Constants")
    }
    reads, writes = ports.get("Inputs", []), ports.get("Outputs", [])
    return InspectedLayer(
        name,
        str(table.get("LayerType", "")),
        str(table.get("TacticName", table.get("TacticValue", ""))),
        tuple(NODE.findall(str(table.get("Metadata", "")))) or (name,),
        tuple(str(port.get("Name", "")) for port in reads),
        tuple(str(port.get("Name", "")) for port in writes),
        tuple(_dtype(port) for port in (*reads, *ports.get("Constants", []))),
    )


def _dtype(port: Mapping[str, object]) -> str:
    return str(port.get("Datatype", port.get("Format/Datatype", "")))


def tensors(engine: trt.ICudaEngine) -> list[InspectedTensor]:
    """Return every input and output of an engine."""
    names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    return [_tensor(engine, name) for name in names]


def _tensor(engine: trt.ICudaEngine, name: str) -> InspectedTensor:
    profiles = range(engine.num_optimization_profiles)
    kind = engine.get_tensor_dtype(name)
    is_input = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
    return InspectedTensor(
        name,
        next((elem_type for elem_type, known in TYPES.items() if known == kind), 0),
        engine.get_tensor_location(name) == trt.TensorLocation.DEVICE,
        tuple(engine.get_tensor_format(name, i) == trt.TensorFormat.LINEAR for i in profiles),
        tuple(_bounds(engine, name, i) for i in profiles) if is_input else (),
    )


def _bounds(engine: trt.ICudaEngine, name: str, profile: int) -> Bounds:
    least, best, most = engine.get_tensor_profile_shape(name, profile)
    return tuple(least), tuple(best), tuple(most)
