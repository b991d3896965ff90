"""Runs a package's graph on ONNX Runtime with what observed steps receive as outputs."""

# onnx publishes no complete types.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx

from thor_dflash.calib.calibrate.activations import OBSERVED
from thor_dflash.calib.calibrate.observed_steps import ObservedStep
from thor_dflash.calib.check.ort_trace import attributes_of, constant
from thor_dflash.core.tensors import Array
from thor_dflash.plugins.contract import Attributes, Op
from thor_dflash.runtime.engines.ort import OrtEngine
from thor_dflash.runtime.engines.protocol import Call


@dataclass(frozen=True, slots=True)
class _Node:
    name: str
    op: Op
    attributes: Attributes
    rows: Mapping[str, str]
    """Port -> value."""
    weights: Mapping[str, str]


class GraphObserver:
    """See StepObserver; of engine ort."""

    def __init__(self, package: Path, engine: OrtEngine) -> None:
        self._package = package
        self._engine = engine
        self._probes: dict[Call, tuple[Call, list[_Node]]] = {}
        self.weights: dict[str, Array] = {}

    def run(self, call: Call) -> Iterator[ObservedStep]:
        """See StepObserver."""
        if call not in self._probes:
            self._probes[call] = self._probe(call)
        probe, nodes = self._probes[call]
        self._engine.run([probe])
        for node in nodes:
            rows = {
                port: self._engine.read(probe.outputs[name]) for port, name in node.rows.items()
            }
            yield ObservedStep(node.name, node.op, node.attributes, rows, node.weights)

    def _probe(self, call: Call) -> tuple[Call, list[_Node]]:
        """Return the call of a graph that has more outputs, and its observed nodes."""
        path = self._package / f"{call.graph.name}.onnx"
        model = onnx.load(str(path), load_external_data=False)
        constants = {tensor.name: tensor for tensor in model.graph.initializer}
        nodes = list(_nodes(model, constants))
        used = {name for node in nodes for name in node.weights.values()}
        self.weights |= {name: constant(self._package, constants[name]) for name in used}
        wanted = {name for node in nodes for name in node.rows.values()} - call.outputs.keys()
        model.graph.output.extend(info for info in model.graph.value_info if info.name in wanted)
        graph = self._engine.load_model(call.graph.name, model.SerializeToString())
        more = {name: self._engine.empty(graph.outputs[name], {}) for name in wanted}
        return Call(graph, call.inputs, {**call.outputs, **more}), nodes


def _nodes(model: onnx.ModelProto, constants: Mapping[str, onnx.TensorProto]) -> Iterator[_Node]:
    for node, op, a, given in observed_nodes(model.graph):
        weights = {port: name for port, name in given.items() if name in constants}
        rows = {port: name for port, name in given.items() if port not in weights}
        yield _Node(node.name, op, a, rows, weights)


def observed_nodes(
    graph: onnx.GraphProto,
) -> Iterator[tuple[onnx.NodeProto, Op, Attributes, Mapping[str, str]]]:
    """Yield the nodes of observed operators, each with port of OBSERVED -> value."""
    for node in graph.node:
        if node.op_type in OBSERVED:
            op, ports = OBSERVED[node.op_type]
            a = attributes_of(op, node)
            given = zip(op.inputs_of(a), node.input, strict=False)
            yield node, op, a, {p.name: name for p, name in given if name and p.name in ports}
