"""Traces a package of engine ort node by node: runs the graph with every value as an output."""

# onnxruntime publishes no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.external_data_helper import load_external_data_for_tensor
from onnx.reference import ReferenceEvaluator

from thor_dflash.calib.check.reference_run import define as definition
from thor_dflash.calib.check.trace_record import Outputs, TracedStep
from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins import OPS
from thor_dflash.plugins.contract import DOMAIN, Attributes, Op
from thor_dflash.runtime.engines.ort import OrtEngine
from thor_dflash.runtime.engines.protocol import Call

_TYPES = {op.type: op for op in OPS}
ROUNDED = 2.0**-8
"""Tolerance of operators on bf16 rows: a value that enters a product may be rounded either way."""


class OrtTracer:
    """See Tracer."""

    def __init__(self, package: Path, engine: OrtEngine) -> None:
        self._package = package
        self._engine = engine

    def steps(self, call: Call) -> Iterator[TracedStep]:
        """See Tracer. All nodes run in one go; the engine's own state does not change."""
        model = onnx.load(str(self._package / f"{call.graph.name}.onnx"), load_external_data=False)
        values = {n: self._engine.read(t) for n, t in call.inputs.items()}
        values |= self._run(model, call)
        constants = {t.name: t for t in model.graph.initializer}
        for node in model.graph.node:
            yield self._seen(model, node, values, constants)

    def _run(self, model: onnx.ModelProto, call: Call) -> dict[str, Array]:
        """Run the graph and return every value of it."""
        probed = onnx.ModelProto()
        probed.CopyFrom(model)
        infos = {v.name: v for v in (*model.graph.output, *model.graph.value_info)}
        del probed.graph.output[:]
        probed.graph.output.extend(infos.values())
        engine = self._engine
        graph = engine.load_model(call.graph.name, probed.SerializeToString())
        sizes = {
            name: size
            for n, spec in graph.inputs.items()
            for name, size in zip(spec.shape, call.inputs[n].spec.at({}), strict=True)
            if isinstance(name, str)
        }
        outputs = {n: engine.empty(spec, sizes) for n, spec in graph.outputs.items()}
        engine.run([Call(graph, call.inputs, outputs)])
        return {n: engine.read(tensor) for n, tensor in outputs.items()}

    def _seen(
        self,
        model: onnx.ModelProto,
        node: onnx.NodeProto,
        values: Mapping[str, Array],
        constants: Mapping[str, onnx.TensorProto],
    ) -> TracedStep:
        op = _TYPES.get(node.op_type) if node.domain == DOMAIN else None
        outputs = {name: values[name] for name in node.output if name}
        inputs = {name: values[name] for name in node.input if name in values}

        def everything() -> dict[str, Array]:
            held = {n: constant(self._package, constants[n]) for n in node.input if n in constants}
            return {**inputs, **held}

        define: Callable[[], Outputs]
        if op is None:
            ports = {name: name for name in outputs}
            define = partial(_standard, model, node, everything)
            tolerance = 0.0
        else:
            attributes = attributes_of(op, node)
            ports = _ports(op.outputs_of(attributes), node.output)
            define = partial(_operator, op, attributes, node, everything, outputs)
            rows = any(DType.of(x) is DType.BF16 for x in inputs.values())
            tolerance = max(op.rtol, ROUNDED) if rows else op.rtol
        name = op.name if op else node.op_type
        step = node.name or node.output[0]
        return TracedStep(model.graph.name, step, name, inputs, outputs, ports, define, tolerance)


def constant(package: Path, tensor: onnx.TensorProto) -> Array:
    """Return a weight of a package's graph."""
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        whole = onnx.TensorProto()
        whole.CopyFrom(tensor)
        load_external_data_for_tensor(whole, str(package))
        return numpy_helper.to_array(whole)
    return numpy_helper.to_array(tensor)


def attributes_of(op: Op, node: onnx.NodeProto) -> Attributes:
    """Return a node's attributes, completed with the operator's defaults."""
    given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    return op.complete(
        {
            name: value.decode() if isinstance(value, bytes) else value
            for name, value in given.items()
            if name in op.attributes
        }
    )


def _ports(ports: tuple[Any, ...], names: Any) -> dict[str, str]:
    """Map value names to ports."""
    return {name: port.name for port, name in zip(ports, names, strict=False) if name}


def _operator(
    op: Op,
    attributes: Attributes,
    node: onnx.NodeProto,
    everything: Callable[[], Mapping[str, Array]],
    outputs: Outputs,
) -> Outputs:
    values = everything()
    pairs = zip(op.inputs_of(attributes), node.input, strict=False)
    x = {port.name: values[name] for port, name in pairs if name}
    have = dict(zip((p.name for p in op.outputs_of(attributes)), outputs.values(), strict=False))
    return definition(op, x, attributes, have)


def _standard(
    model: onnx.ModelProto, node: onnx.NodeProto, everything: Callable[[], Mapping[str, Array]]
) -> Outputs:
    values = everything()
    infos = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for n, x in values.items()
    ]
    outputs = [v for v in (*model.graph.value_info, *model.graph.output) if v.name in node.output]
    graph = helper.make_graph([node], "one", infos, outputs)
    one = helper.make_model(
        graph, opset_imports=list(model.opset_import), ir_version=model.ir_version
    )
    found = ReferenceEvaluator(one).run(None, dict(values))
    return {v.name: np.asarray(x) for v, x in zip(outputs, found, strict=True)}
