"""Writes ONNX node by node: function bodies of the operators, and whole graphs.

A body defines a node in standard ONNX operators: ONNX Runtime inlines it, while TensorRT and the
CUDA engine ignore it and run their own kernel for the node.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins.contract import DOMAIN, VERSION, Attribute, Attributes, Op

OPSET = 21
IR_VERSION = 10

ONNX_TYPE: dict[DType, int] = {
    DType.F32: onnx.TensorProto.FLOAT,
    DType.F16: onnx.TensorProto.FLOAT16,
    DType.BF16: onnx.TensorProto.BFLOAT16,
    DType.FP8: onnx.TensorProto.FLOAT8E4M3FN,
    DType.U8: onnx.TensorProto.UINT8,
    DType.I32: onnx.TensorProto.INT32,
    DType.I64: onnx.TensorProto.INT64,
    DType.BOOL: onnx.TensorProto.BOOL,
}

Step = Callable[["FunctionBuilder", tuple[str, ...]], tuple[list[str], list[str]]]
"""Loop body: values of one iteration -> (values carried to the next one, collected values)."""


class FunctionBuilder:
    """A list of nodes under construction. Values are represented by their names."""

    def __init__(self, prefix: str = "") -> None:
        self.nodes: list[onnx.NodeProto] = []
        self._prefix = prefix
        self._count = 0

    def name(self) -> str:
        """Returns an unused value name."""
        self._count += 1
        return f"{self._prefix}_{self._count}"

    def op(self, kind: str, *inputs: str, **attributes: Attribute | Sequence[int]) -> str:
        """A node of the standard domain with one output."""
        return self.ops(kind, inputs, 1, **attributes)[0]

    def ops(
        self,
        kind: str,
        inputs: Sequence[str],
        outputs: int,
        **attributes: Attribute | Sequence[int],
    ) -> tuple[str, ...]:
        """A node of the standard domain with several outputs."""
        names = [self.name() for _ in range(outputs)]
        self.nodes.append(node(kind, inputs, names, attributes))
        return tuple(names)

    def const(self, value: Array) -> str:
        """A constant tensor."""
        name = self.name()
        tensor = numpy_helper.from_array(value, name)
        self.nodes.append(helper.make_node("Constant", [], [name], value=tensor))
        return name

    def f32(self, value: float | np.float32) -> str:
        """A float32 scalar."""
        return self.const(np.array(value, np.float32))

    def i64(self, *values: int) -> str:
        """An int64 vector."""
        return self.const(np.array(values, np.int64))

    def scalar(self, value: int) -> str:
        """An int64 scalar."""
        return self.const(np.array(value, np.int64))

    def cast(self, x: str, dtype: DType) -> str:
        """Convert element type."""
        return self.op("Cast", x, to=ONNX_TYPE[dtype])

    def narrow(self, x: str, dtype: DType) -> str:
        """Convert a float32 value to an element type; no node for float32."""
        return x if dtype is DType.F32 else self.cast(x, dtype)

    def round(self, x: str, dtype: DType) -> str:
        """Round a float32 value to an element type and convert it back to float32."""
        return x if dtype is DType.F32 else self.cast(self.cast(x, dtype), DType.F32)

    def reshape(self, x: str, *shape: int) -> str:
        """Reshape; 0 keeps a size, -1 infers it."""
        return self.op("Reshape", x, self.i64(*shape))

    def slice(self, x: str, start: str, end: str, axis: int) -> str:
        """x[start:end] along one axis; bounds are int64[1] values."""
        return self.op("Slice", x, start, end, self.i64(axis))

    def take(self, x: str, start: int, end: int, axis: int) -> str:
        """x[start:end] along one axis, with constant bounds."""
        return self.slice(x, self.i64(start), self.i64(end), axis)

    def split(self, x: str, sizes: Sequence[int], axis: int) -> tuple[str, ...]:
        """Consecutive pieces along one axis."""
        return self.ops("Split", [x, self.i64(*sizes)], len(sizes), axis=axis)

    def concat(self, axis: int, *parts: str) -> str:
        """Join along one axis."""
        return self.op("Concat", *parts, axis=axis)

    def sum(self, x: str, axis: int) -> str:
        """Sum over one axis, which is kept with size 1."""
        return self.op("ReduceSum", x, self.i64(axis), keepdims=1)

    def max(self, x: str, axis: int) -> str:
        """Maximum over one axis, which is kept with size 1."""
        return self.op("ReduceMax", x, self.i64(axis), keepdims=1)

    def silu(self, x: str) -> str:
        """x * sigmoid(x)."""
        return self.op("Mul", x, self.op("Sigmoid", x))

    def sub(self) -> FunctionBuilder:
        """Returns an empty body for a subgraph; its names cannot collide with this body's."""
        self._count += 1
        return FunctionBuilder(f"{self._prefix}s{self._count}_")

    def loop(
        self,
        trips: str,
        carried: Sequence[tuple[str, DType]],
        collected: Sequence[DType],
        step: Step,
    ) -> tuple[str, ...]:
        """`for i in range(trips)`. `trips` is an int64 scalar; `step` gets (i, *carried).

        Returns the last carried values, then the collected ones stacked on a new first axis.
        """
        sub = self.sub()
        i, go = sub.name(), sub.name()
        ins = [sub.name() for _ in carried]
        on, out = step(sub, (i, *ins))
        go_on = sub.op("Identity", go)
        on, out = _outputs(sub, on, out)
        types = [d for _, d in carried]
        graph = helper.make_graph(
            sub.nodes,
            "step",
            [
                _value(i, DType.I64, ()),
                helper.make_tensor_value_info(go, onnx.TensorProto.BOOL, ()),
                *(_value(n, d, None) for n, d in zip(ins, types, strict=True)),
            ],
            [
                helper.make_tensor_value_info(go_on, onnx.TensorProto.BOOL, ()),
                *(_value(n, d, None) for n, d in zip(on, types, strict=True)),
                *(_value(n, d, None) for n, d in zip(out, collected, strict=True)),
            ],
        )
        names = [self.name() for _ in (*carried, *collected)]
        self.nodes.append(
            helper.make_node("Loop", [trips, "", *(v for v, _ in carried)], names, body=graph)
        )
        return tuple(names)

    def scan(
        self,
        carried: Sequence[tuple[str, Sequence[int]]],
        rows: Sequence[str],
        collected: Sequence[Sequence[int]],
        step: Step,
    ) -> tuple[str, ...]:
        """`for row in zip(*rows)` along the first axis; `step` gets (*carried, *row). All float32.

        The shapes given for carried and collected values are those of one iteration. Returns the
        last carried values, then the collected ones stacked on a new first axis.
        """
        sub = self.sub()
        ins = [sub.name() for _ in (*carried, *rows)]
        on, out = _outputs(sub, *step(sub, tuple(ins)))
        shapes = [shape for _, shape in carried]
        graph = helper.make_graph(
            sub.nodes,
            "step",
            [
                _value(n, DType.F32, d)
                for n, d in zip(ins, (*shapes, *(None for _ in rows)), strict=True)
            ],
            [
                _value(n, DType.F32, d)
                for n, d in zip((*on, *out), (*shapes, *collected), strict=True)
            ],
        )
        names = [self.name() for _ in (*carried, *collected)]
        self.nodes.append(
            helper.make_node(
                "Scan",
                [*(v for v, _ in carried), *rows],
                names,
                body=graph,
                num_scan_inputs=len(rows),
            )
        )
        return tuple(names)

    def branch(
        self,
        condition: str,
        then: Callable[[FunctionBuilder], str],
        other: Callable[[FunctionBuilder], str],
        dtype: DType,
    ) -> str:
        """`then if condition else other`; only the branch that is taken is computed."""
        graphs: list[onnx.GraphProto] = []
        for make in (then, other):
            sub = self.sub()
            out = sub.op("Identity", make(sub))
            graphs.append(helper.make_graph(sub.nodes, "branch", [], [_value(out, dtype, None)]))
        name = self.name()
        self.nodes.append(
            helper.make_node(
                "If", [condition], [name], then_branch=graphs[0], else_branch=graphs[1]
            )
        )
        return name


def _outputs(sub: FunctionBuilder, on: list[str], out: list[str]) -> tuple[list[str], list[str]]:
    """Returns a subgraph's outputs, so that each is a distinct value made inside the subgraph.

    Inserts an Identity only where necessary, as it copies the value, which is slow for a state.
    """
    made = {name for n in sub.nodes for name in n.output}
    seen: set[str] = set()
    named: list[str] = []
    for value in (*on, *out):
        named.append(value if value in made - seen else sub.op("Identity", value))
        seen.add(value)
    return named[: len(on)], named[len(on) :]


def node(
    kind: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    attributes: Mapping[str, Attribute | Sequence[int]],
) -> onnx.NodeProto:
    """A node of the standard domain."""
    made = helper.make_node(kind, inputs, outputs)
    made.attribute.extend(helper.make_attribute(key, value) for key, value in attributes.items())
    return made


def _value(name: str, dtype: DType, shape: Sequence[int | str] | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, ONNX_TYPE[dtype], shape)


class Inputs:
    """The inputs of one call, for its body: names, element types, and which are present."""

    def __init__(self, dtypes: Mapping[str, DType]) -> None:
        self._dtypes = dtypes

    def __getitem__(self, port: str) -> str:
        if port not in self._dtypes:
            raise KeyError(port)
        return port

    def __contains__(self, port: str) -> bool:
        return port in self._dtypes

    def dtype(self, port: str) -> DType:
        """Element type of an input that is present."""
        return self._dtypes[port]

    def f32(self, b: FunctionBuilder, port: str) -> str:
        """The input in float32."""
        return port if self._dtypes[port] is DType.F32 else b.cast(port, DType.F32)


BodyMaker = Callable[[FunctionBuilder, Inputs, Attributes], Mapping[str, str]]
"""An operator's body: adds nodes to the Body and returns output port -> value."""


def overload(op: Op, dtypes: Mapping[str, DType], attributes: Attributes) -> str:
    """Name of one variant of an operator's body, a hash of input types and attributes."""
    text = repr(
        (
            op.name,
            sorted((k, v.value) for k, v in dtypes.items()),
            sorted(attributes.values.items()),
        )
    )
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def function(
    op: Op, make: BodyMaker, dtypes: Mapping[str, DType], attributes: Attributes
) -> onnx.FunctionProto:
    """The ONNX local function of one variant."""
    b = FunctionBuilder()
    made = make(b, Inputs(dtypes), attributes)
    outputs = [p.name for p in op.outputs_of(attributes)]
    b.nodes.extend(helper.make_node("Identity", [made[name]], [name]) for name in outputs)
    proto = helper.make_function(
        DOMAIN,
        op.type,
        [p.name for p in op.inputs_of(attributes)],
        outputs,
        b.nodes,
        [helper.make_opsetid("", OPSET)],
    )
    proto.overload = overload(op, dtypes, attributes)
    return proto


def call(
    op: Op,
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
    dtypes: Mapping[str, DType],
    attributes: Attributes,
) -> onnx.NodeProto:
    """Returns the node that calls an operator. Absent optional inputs are empty strings in their
    place.

    TensorRT 10.7 to 11 all prefer a registered plugin to the body if the node itself has the
    attributes for plugin namespace and version.
    """
    made = node(
        op.type,
        [inputs.get(p.name, "") for p in op.inputs_of(attributes)],
        [outputs[p.name] for p in op.outputs_of(attributes)],
        {"plugin_namespace": DOMAIN, "plugin_version": str(VERSION), **attributes.values},
    )
    made.domain = DOMAIN
    made.overload = overload(op, dtypes, attributes)
    return made
