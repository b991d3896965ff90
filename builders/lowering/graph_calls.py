"""Reads the operator calls of an ONNX graph.

The few standard nodes that our graphs use (embedding, concatenation, composing the drafted block)
are recognised as whole patterns; any other node has no kernel and is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import onnx
from onnx import numpy_helper

from thor_dflash.builders.lowering.op_call import OperatorCall, ValueType
from thor_dflash.core.errors import ConfigError
from thor_dflash.plugins import OPS
from thor_dflash.plugins.contract import DOMAIN
from thor_dflash.plugins.onnx_builder import ONNX_TYPE

_TYPES = {op.type: op for op in OPS}
_DTYPES = {kind: dtype for dtype, kind in ONNX_TYPE.items()}
"""Element types of onnx.TensorProto."""


@dataclass(slots=True)
class CallGraph:
    """The operator calls of one graph, in order, and what is known of its values."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    types: dict[str, ValueType]
    """Of every value and constant."""
    constants: dict[str, onnx.TensorProto]
    calls: list[OperatorCall]


def read_calls(model: onnx.ModelProto) -> CallGraph:
    """Read a graph.

    Raises:
        ConfigError: it has a node without a kernel; names the node and the reason.
    """
    reader, graph = _Reader(model), model.graph
    return CallGraph(
        name=str(graph.name),
        inputs=tuple(i.name for i in graph.input),
        outputs=tuple(o.name for o in graph.output),
        types=reader.types,
        constants=reader.constants,
        calls=list(reader.calls()),
    )


@dataclass(slots=True)
class _Reader:
    """The values of a graph, and the node that makes each."""

    model: onnx.ModelProto
    types: dict[str, ValueType] = field(default_factory=dict[str, ValueType])
    constants: dict[str, onnx.TensorProto] = field(default_factory=dict[str, onnx.TensorProto])
    makers: dict[str, onnx.NodeProto] = field(default_factory=dict[str, onnx.NodeProto])

    def __post_init__(self) -> None:
        graph = self.model.graph
        for info in (*graph.input, *graph.output, *graph.value_info):
            kind = info.type.tensor_type
            shape = tuple(d.dim_param or int(d.dim_value) for d in kind.shape.dim)
            self.types[info.name] = ValueType(_DTYPES[kind.elem_type], shape)
        for tensor in graph.initializer:
            self.constants[tensor.name] = tensor
            self.types[tensor.name] = ValueType(_DTYPES[tensor.data_type], tuple(tensor.dims))
        for node in graph.node:
            self.makers |= dict.fromkeys(node.output, node)

    def _refusal(self, node: onnx.NodeProto, why: str) -> ConfigError:
        """The error for a node without a kernel."""
        return ConfigError(
            f"build.engine cuda and tensorrt must have a kernel for every node of the graphs "
            f"(got {self.model.graph.name}: {node.op_type} {node.name}: {why})"
        )

    def calls(self) -> Iterator[OperatorCall]:
        """Yield the calls in order; a pattern of standard nodes counts at its last node."""
        for node in self.model.graph.node:
            if node.domain == DOMAIN:
                yield self._operator(node)
            elif (call := self._standard(node)) is not None:
                yield call

    def _operator(self, node: onnx.NodeProto) -> OperatorCall:
        """The call of a node of our own domain."""
        op = _TYPES[node.op_type]
        given = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        values = {
            name: given[name].decode() if isinstance(given[name], bytes) else given[name]
            for name in op.attributes
            if name in given
        }
        a = op.complete(values)
        ins = zip(op.inputs_of(a), node.input, strict=False)
        outs = zip(op.outputs_of(a), node.output, strict=True)
        return OperatorCall(
            node.name,
            op.name,
            dict(a.values),
            {port.name: name for port, name in ins if name},
            {port.name: name for port, name in outs},
        )

    def _standard(self, node: onnx.NodeProto) -> OperatorCall | None:
        """The call of the pattern that ends with a standard node; None within a pattern."""
        used = [n for n in self.model.graph.node if set(node.output) & set(n.input)]
        if node.op_type == "Gather":
            return None if _is(used, "Cast") else self._embed(node, node)
        if node.op_type == "Cast" and _is([self.makers.get(node.input[0])], "Gather"):
            return self._embed(self.makers[node.input[0]], node)
        if node.op_type == "Concat" and self._axis(node) == 1:
            sources = {f"x{i}": name for i, name in enumerate(node.input)}
            return OperatorCall(node.name, "concat", {}, sources, {"y": node.output[0]})
        if node.op_type == "Concat" and _is(used, "Gather"):
            return None  # the ids of a drafted block, which `_embed` includes
        if node.op_type == "Concat" and len(node.input) == 2:
            return self._compose(node)
        if node.op_type in ("Slice", "Cast", "Max", "Less", "Where"):
            return None  # parts of the pattern of `_compose`
        raise self._refusal(node, "no such kernel")

    def _axis(self, node: onnx.NodeProto) -> int:
        return next(int(a.i) for a in node.attribute if a.name == "axis")

    def _embed(self, gather: onnx.NodeProto, last: onnx.NodeProto) -> OperatorCall:
        """rows = table[ids]; for a drafter, the ids are one id followed by mask tokens."""
        table, ids = gather.input
        mask = -1
        if (concat := self.makers.get(ids)) is not None and concat.op_type == "Concat":
            ids, masks = concat.input
            tokens = set(numpy_helper.to_array(self.constants[masks]).tolist())
            if len(tokens) != 1:
                raise self._refusal(concat, "the masks must be one token")
            [mask] = tokens
        return OperatorCall(
            last.output[0],
            "embed",
            {"mask": int(mask)},
            {"table": table, "ids": ids},
            {"rows": last.output[0]},
        )

    def _compose(self, node: onnx.NodeProto) -> OperatorCall:
        """tokens = [last, where(forced < 0, max(best[1:], 0), forced[:-1])], computed in int64."""
        last, follow = node.input
        where = self._up(self._up(node, 1, "Cast"), 0, "Where")
        less = self._up(where, 0, "Less")
        best = self._up(self._up(self._up(where, 1, "Max"), 0, "Cast"), 0, "Slice")
        forced = self._up(self._up(where, 2, "Cast"), 0, "Slice")
        ends = [int(numpy_helper.to_array(self.constants[n])[0]) for s in (best, forced)
                for n in s.input[1:3]]  # fmt: skip
        rows = self.types[node.output[0]].shape[0]
        if ends != [1, rows, 0, int(rows) - 1] or less.input[0] != where.input[2]:
            raise self._refusal(node, f"not the composing of a block ({follow})")
        return OperatorCall(
            node.output[0],
            "compose",
            {},
            {"last": last, "forced": forced.input[0], "best": best.input[0]},
            {"tokens": node.output[0]},
        )

    def _up(self, node: onnx.NodeProto, index: int, kind: str) -> onnx.NodeProto:
        """The node that makes an input of a node, which must be of a kind."""
        maker = self.makers.get(node.input[index])
        if maker is None or maker.op_type != kind:
            raise self._refusal(node, f"its input {index} must come from a {kind}")
        return maker


def _is(nodes: Sequence[onnx.NodeProto | None], kind: str) -> bool:
    return bool(nodes) and all(n is not None and n.op_type == kind for n in nodes)
