"""An ONNX graph under construction: typed values, operator calls, weights by reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper, numpy_helper

from thor_dflash.builders.output.weight_files import StoredTensor
from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins.contract import DOMAIN, IN_PLACE, VERSION, Attribute, Op, bind
from thor_dflash.plugins.onnx_builder import IR_VERSION, ONNX_TYPE, OPSET, call, function, node
from thor_dflash.plugins.onnx_registry import BODIES

Shape = tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class GraphValue:
    """An edge of the graph."""

    name: str
    dtype: DType
    shape: Shape


class GraphBuilder:
    """Nodes, inputs and outputs of one step, in order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: dict[str, GraphValue] = {}
        self._outputs: dict[str, GraphValue] = {}
        self._known: dict[str, GraphValue] = {}
        self._weights: dict[str, onnx.TensorProto] = {}
        self._functions: dict[str, onnx.FunctionProto] = {}
        self._in_place: set[str] = set()

    def input(self, name: str, dtype: DType, shape: Sequence[int | str]) -> GraphValue:
        """Return an input of the graph; created at the first call with this name."""
        value = GraphValue(name, dtype, tuple(shape))
        known = self._inputs.setdefault(name, value)
        assert known == value, name
        return known

    def output(self, value: GraphValue) -> None:
        """Make a value an output, under its own name."""
        self._outputs[value.name] = value

    def weight(self, stored: StoredTensor) -> GraphValue:
        """Return a tensor of the package's weight files as a value."""
        if stored.name not in self._weights:
            tensor = onnx.TensorProto(
                name=stored.name, data_type=ONNX_TYPE[stored.dtype], dims=stored.shape
            )
            tensor.data_location = onnx.TensorProto.EXTERNAL
            place = {"location": stored.file, "offset": stored.offset, "length": stored.nbytes}
            for key, value in place.items():
                tensor.external_data.add(key=key, value=str(value))
            self._weights[stored.name] = tensor
        return GraphValue(stored.name, stored.dtype, stored.shape)

    def constant(self, name: str, value: Array) -> GraphValue:
        """Add a small tensor that is held in the graph itself."""
        self._weights[name] = numpy_helper.from_array(value, name)
        return GraphValue(name, DType.of(value), value.shape)

    def node(
        self,
        kind: str,
        name: str,
        dtype: DType,
        shape: Sequence[int | str],
        *inputs: GraphValue,
        **attributes: Attribute,
    ) -> GraphValue:
        """Add a node of the standard domain. Returns its one output, which has the node's name."""
        made = node(kind, [v.name for v in inputs], [name], attributes)
        made.name = name
        self._nodes.append(made)
        value = GraphValue(name, dtype, tuple(shape))
        self._known[name] = value
        return value

    def operator(
        self,
        op: Op,
        name: str,
        inputs: Mapping[str, GraphValue],
        attributes: Mapping[str, Attribute],
        names: Mapping[str, str] | None = None,
    ) -> dict[str, GraphValue]:
        """Add a call of an operator. Outputs are `<name>.<port>` unless renamed in `names`."""
        a = op.complete(attributes)
        dtypes = {port: value.dtype for port, value in inputs.items()}
        sizes = bind(op, {port: value.shape for port, value in inputs.items()}, a)
        outputs: dict[str, GraphValue] = {}
        for port in op.outputs_of(a):
            dtype = dtypes[port.like] if port.like else port.dtypes[0]
            shape = tuple(sizes[d] if isinstance(d, str) else d for d in port.shape)
            out = (names or {}).get(port.name, f"{name}.{port.name}")
            outputs[port.name] = self._known[out] = GraphValue(out, dtype, shape)
            if op.alias_of(port.name):
                self._in_place.add(out)
        made = call(
            op,
            {p: v.name for p, v in inputs.items()},
            {p: v.name for p, v in outputs.items()},
            dtypes,
            a,
        )
        made.name = name
        self._nodes.append(made)
        if made.overload not in self._functions:
            self._functions[made.overload] = function(op, BODIES[op.name], dtypes, a)
        return outputs

    def proto(self) -> onnx.ModelProto:
        """Return the ONNX model. Weights stay in their files."""
        known = {n: v for n, v in self._known.items() if n not in self._outputs}
        graph = helper.make_graph(
            self._nodes,
            self.name,
            [_info(v) for v in self._inputs.values()],
            [_info(v) for v in self._outputs.values()],
            list(self._weights.values()),
            value_info=[_info(v) for v in known.values()],
        )
        model = helper.make_model(
            graph,
            functions=list(self._functions.values()),
            ir_version=IR_VERSION,
            producer_name="thor-dflash",
            opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, VERSION)],
        )
        model.metadata_props.add(key=IN_PLACE, value=" ".join(sorted(self._in_place)))
        return model


def _info(value: GraphValue) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(value.name, ONNX_TYPE[value.dtype], value.shape)


def integers(*values: int) -> Array:
    """Return an int64 vector for `Graph.constant`."""
    return np.array(values, np.int64)
