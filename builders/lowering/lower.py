"""Lowers ONNX graphs to launch lists (programs): the operator calls in order, weights packed as the
kernels read them, and an offset in scratch memory for every intermediate value.

The ONNX graph is the only description of a model: a program is derived from its nodes. The few
standard nodes that our graphs use (embedding, concatenation, composing the drafted block) are
recognised as whole patterns; any other node has no kernel and is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import numpy_helper

from thor_dflash.builders.lowering.op_call import OperatorCall, ValueType
from thor_dflash.builders.lowering.packed_weights import WeightPacker
from thor_dflash.core.errors import ConfigError
from thor_dflash.core.tensors import DType
from thor_dflash.package.launch_program import ALIGNMENT, Program, Step, Value, Weight
from thor_dflash.plugins import OPS
from thor_dflash.plugins.contract import DOMAIN, Attributes
from thor_dflash.plugins.launch import PREFETCHED, CallSite, Shaped
from thor_dflash.plugins.linear.decode_launch import (
    SQUARES_ROWS,
    head_squares,
    row_squares,
    slabs,
    takes_heads,
)
from thor_dflash.plugins.linear.prologue_launch import SLAB
from thor_dflash.plugins.registry import KERNELS

_TYPES = {op.type: op for op in OPS}
_DTYPES = {1: DType.F32, 2: DType.U8, 6: DType.I32, 7: DType.I64, 9: DType.BOOL,
           10: DType.F16, 16: DType.BF16, 17: DType.FP8}  # fmt: skip
"""Element types of onnx.TensorProto."""


@dataclass(slots=True)
class _Lowering:
    """The state of lowering one graph to a program."""

    model: onnx.ModelProto
    packing: WeightPacker
    known: dict[str, ValueType] = field(default_factory=dict[str, ValueType])
    constants: dict[str, onnx.TensorProto] = field(default_factory=dict[str, onnx.TensorProto])
    makers: dict[str, onnx.NodeProto] = field(default_factory=dict[str, onnx.NodeProto])
    calls: list[OperatorCall] = field(default_factory=list[OperatorCall])
    weights: dict[str, Weight] = field(default_factory=dict[str, Weight])

    @property
    def name(self) -> str:
        return str(self.model.graph.name)

    def read(self) -> None:
        graph = self.model.graph
        for info in (*graph.input, *graph.output, *graph.value_info):
            kind = info.type.tensor_type
            shape = tuple(d.dim_param or int(d.dim_value) for d in kind.shape.dim)
            self.known[info.name] = ValueType(_DTYPES[kind.elem_type], shape)
        for tensor in graph.initializer:
            self.constants[tensor.name] = tensor
            self.known[tensor.name] = ValueType(_DTYPES[tensor.data_type], tuple(tensor.dims))
        for node in graph.node:
            self.makers |= dict.fromkeys(node.output, node)

    def refuse(self, node: onnx.NodeProto, why: str) -> ConfigError:
        return ConfigError(
            f"build.engine cuda and tensorrt must have a kernel for every node of the graphs "
            f"(got {self.name}: {node.op_type} {node.name}: {why})"
        )

    def walk(self) -> None:
        """Collect the calls in order; a pattern of standard nodes counts at its last node."""
        for node in self.model.graph.node:
            if node.domain == DOMAIN:
                self.calls.append(self._operator(node))
            elif (call := self._standard(node)) is not None:
                self.calls.append(call)

    def _operator(self, node: onnx.NodeProto) -> OperatorCall:
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
        raise self.refuse(node, "no such kernel")

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
                raise self.refuse(concat, "the masks must be one token")
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
        rows = self.known[node.output[0]].shape[0]
        if ends != [1, rows, 0, int(rows) - 1] or less.input[0] != where.input[2]:
            raise self.refuse(node, f"not the composing of a block ({follow})")
        return OperatorCall(
            node.output[0],
            "compose",
            {},
            {"last": last, "forced": forced.input[0], "best": best.input[0]},
            {"tokens": node.output[0]},
        )

    def _up(self, node: onnx.NodeProto, index: int, kind: str) -> onnx.NodeProto:
        maker = self.makers.get(node.input[index])
        if maker is None or maker.op_type != kind:
            raise self.refuse(node, f"its input {index} must come from a {kind}")
        return maker

    def prune(self) -> None:
        """Drop optional outputs that nothing reads, so that their kernels need not run."""
        read = {n for call in self.calls for n in call.inputs.values()}
        read |= {o.name for o in self.model.graph.output}
        for call in self.calls:
            rule = KERNELS[call.op]
            call.outputs = {
                port: name
                for port, name in call.outputs.items()
                if name in read or port not in rule.optional
            }

    def join_states(self) -> None:
        """Let a state that several calls update in turn be one buffer, under its last name."""
        given = {i.name for i in self.model.graph.input}
        last: dict[str, str] = {}
        for call in reversed(self.calls):
            for port, name in call.outputs.items():
                if source := KERNELS[call.op].op.alias_of(port):
                    call.outputs[port] = last.get(name, name)
                    if (before := call.inputs[source]) not in given:
                        last[before] = call.outputs[port]
        for call in self.calls if last else ():
            call.inputs = {port: last.get(name, name) for port, name in call.inputs.items()}

    def share_rows(self) -> None:
        """Let the call that makes a block's rows also write them as slabs, the layout that the next
        linear's kernel reads, with that linear's norm weight and gate already applied, as it has
        the values at hand. The factor 1 / rms of the whole row, or of each head of it, is not known
        then; the linear gets it from sums of squares that are written beside the slabs.
        """
        order = {n: at for at, call in enumerate(self.calls) for n in call.outputs.values()}
        written: dict[str, tuple[object, ...]] = {}  # rows -> how their slabs are prepared
        for call in self.calls:
            x, gate = call.inputs.get("x", ""), call.inputs.get("gate", "")
            if x not in order or not self._takes_slabs(call):
                continue
            maker, norm = self.calls[order[x]], call.inputs.get("norm_weight")
            # A gate that is computed after the rows cannot be applied while they are written.
            if not _prepares(maker, call) or order.get(gate, -1) > order[x]:
                continue
            if written.setdefault(x, _preparation(call)) != _preparation(call):
                continue
            rows, columns = (int(n) for n in self.known[x].shape)
            self._share(
                f"{x}.slabs", ValueType(DType.BF16, slabs(rows, columns)), maker, call, "slabs"
            )
            if gate:
                maker.inputs["next_gate"] = gate
            if norm:
                maker.inputs["next_norm_weight"] = norm
                maker.attributes["next_norm_offset"] = call.attributes["norm_offset"]
                head = int(call.attributes.get("head_dim", 0))
                shape = head_squares(columns // head) if head else row_squares(columns)
                self._share(f"{x}.squares", ValueType(DType.F32, shape), maker, call, "squares")

    def _share(
        self, name: str, known: ValueType, maker: OperatorCall, call: OperatorCall, port: str
    ) -> None:
        self.known[name] = known
        maker.outputs[f"y0_{port}"] = call.inputs[f"x_{port}"] = name

    def _takes_slabs(self, call: OperatorCall) -> bool:
        if call.op not in ("linear", "head"):
            return False
        columns = int(self.known[call.inputs["x"]].shape[1])
        fits = not call.attributes.get("head_dim", 0) or takes_heads(self.site(call, {}))
        return fits and self._few(call) and columns % SLAB == 0

    def _few(self, product: OperatorCall) -> bool:
        return int(self.known[product.inputs["x"]].shape[0]) <= SQUARES_ROWS

    def pack(self) -> None:
        """Replace the weights of each call by their packed form; keep other constants."""
        for call in self.calls:
            rule = KERNELS[call.op]
            if rule.packed is not None:
                ports = [p for p in call.inputs if p.rstrip("0123456789") in _WEIGHT_PORTS]
                sources = {port: call.inputs.pop(port) for port in ports}
                site = self.site(call, sources)
                self.check(call, site)
                for port, stored in self.packing.packed(rule, site, sources).items():
                    call.inputs[port] = stored.name
                    self._use(stored.name)
            for name in call.inputs.values():
                if name in self.constants:
                    self._place(name)
            self.check(call, self.site(call, {}))

    def look_ahead(self) -> None:
        """Let a call that leaves memory idle prefetch the next product's weight into the L2 cache.
        That product, which then reads its weight from the cache, prefetches for the product after
        it. A product of more rows than a block can have is not prefetched: the call before it keeps
        memory busy itself, as does gdn in a prefill step of any size.
        """
        idle = False
        before: OperatorCall | None = None  # an idle call, or a product whose weight was prefetched
        for call in self.calls:
            if "packed" in call.inputs:
                fetched = before is not None and self._few(call)
                if before is not None and fetched:
                    before.inputs[PREFETCHED] = call.inputs["packed"]
                before, idle = (call if fetched and idle else None), False
            elif KERNELS[call.op].prefetches(call.attributes):
                before, idle = call, True

    def _place(self, name: str) -> None:
        tensor = self.constants[name]
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            self.packing.plain(name)
        else:
            self.packing.constant(name, numpy_helper.to_array(tensor))
        self._use(name)

    def _use(self, name: str) -> None:
        stored = self.packing.stored(name)
        self.known[name] = ValueType(stored.dtype, stored.shape)
        self.weights[name] = Weight(
            dtype=stored.dtype.value, shape=stored.shape, file=stored.file, offset=stored.offset
        )

    def site(self, call: OperatorCall, more: Mapping[str, str]) -> CallSite:
        """Return the call with every size a number; NOMINAL stands for sizes a session decides."""
        ports: dict[str, Shaped] = {}
        for port, name in {**call.inputs, **more, **call.outputs}.items():
            known = self.known[name]
            shape = tuple(NOMINAL if isinstance(d, str) else d for d in known.shape)
            ports[port] = Shaped(known.dtype, shape)
        return CallSite(KERNELS[call.op].op, Attributes(call.attributes), ports)

    def check(self, call: OperatorCall, site: CallSite) -> None:
        """Refuse at build time what the engine would refuse when it loads the package."""
        if why := KERNELS[call.op].refuse(site):
            # Only the rows of a block have a bound. Those of a weight are the checkpoint's.
            bound = " at most " in why and " rows (" in why
            hint = "; build.block and build.widths set the rows of a step" if bound else ""
            raise ConfigError(
                "build.engine cuda and tensorrt must have kernels for the sizes of step "
                f"{self.name} (got {call.name}: {why}){hint}"
            )

    def program(self) -> Program:
        graph = self.model.graph
        outside = {i.name for i in (*graph.input, *graph.output)}
        used = {n for call in self.calls for n in (*call.inputs.values(), *call.outputs.values())}
        inside = [n for n in used if n not in outside and n not in self.weights]
        offsets, scratch = assign_offsets(self._lives(set(inside)))
        return Program(
            name=self.name,
            inputs={i.name: self._value(i.name) for i in graph.input},
            outputs={o.name: self._value(o.name) for o in graph.output},
            values={name: self._value(name, offsets[name]) for name in sorted(inside)},
            weights=self.weights,
            steps=tuple(
                Step(name=c.name, op=c.op, attributes=c.attributes,
                     ports={**c.inputs, **c.outputs})
                for c in self.calls
            ),
            scratch=scratch,
        )  # fmt: skip

    def _value(self, name: str, offset: int = -1) -> Value:
        known = self.known[name]
        return Value(dtype=known.dtype.value, shape=known.shape, offset=offset)

    def _lives(self, inside: set[str]) -> list[Lifetime]:
        lives: dict[str, Lifetime] = {}
        for at, call in enumerate(self.calls):
            for name in (*call.inputs.values(), *call.outputs.values()):
                if name in inside:
                    life = lives.setdefault(name, Lifetime(name, self._nbytes(name), at, at))
                    life.last = at
        return list(lives.values())

    def _nbytes(self, name: str) -> int:
        known = self.known[name]
        size = int(np.prod([int(d) for d in known.shape], dtype=np.int64)) * known.dtype.bytes
        return -(-size // ALIGNMENT) * ALIGNMENT


NOMINAL = 128
"""Stands for the rows of a cache, which a session decides, while a graph is checked."""
_WEIGHT_PORTS = ("weight", "block_scale", "row_scale")


def _prepares(maker: OperatorCall, call: OperatorCall) -> bool:
    """Whether a call can write its rows as slabs for another call's product."""
    rule, gate = KERNELS[maker.op], call.attributes.get("gate", "none")
    if call.attributes.get("head_dim", 0):
        normed = "norm_weight" in call.inputs
        return normed and gate == "silu" and rule.fuses_head_norm(maker.attributes)
    if gate != "none":
        return (
            gate == "sigmoid"
            and "norm_weight" not in call.inputs
            and rule.fuses_gate(maker.attributes)
        )
    return (rule.fuses_norm if "norm_weight" in call.inputs else rule.writes_slabs)(
        maker.attributes
    )


def _preparation(call: OperatorCall) -> tuple[object, ...]:
    """Returns what is applied to rows before the call's product."""
    norm, gate = (call.inputs.get(name) for name in ("norm_weight", "gate"))
    return norm, norm and call.attributes["norm_offset"], gate, call.attributes.get("head_dim", 0)


def _is(nodes: Sequence[onnx.NodeProto | None], kind: str) -> bool:
    return bool(nodes) and all(n is not None and n.op_type == kind for n in nodes)


@dataclass(slots=True)
class Lifetime:
    """A value's lifetime: from the step that writes it to the last that reads it, inclusive."""

    name: str
    nbytes: int
    first: int
    last: int


def assign_offsets(lives: Sequence[Lifetime]) -> tuple[dict[str, int], int]:
    """Assign offsets so that values alive at the same time never overlap. Returns them and the
    total size, bytes.

    Largest first, each at the lowest offset that is free for its whole lifetime (greedy by size;
    Pisarchyk and Lee 2020).
    """
    placed: list[tuple[int, Lifetime]] = []
    for life in sorted(lives, key=lambda v: (-v.nbytes, v.first, v.name)):
        busy = sorted(
            (offset, offset + other.nbytes)
            for offset, other in placed
            if other.first <= life.last and life.first <= other.last
        )
        at = 0
        for start, end in busy:
            if start - at >= life.nbytes:
                break
            at = max(at, end)
        placed.append((at, life))
    total = max((offset + life.nbytes for offset, life in placed), default=0)
    return {life.name: offset for offset, life in placed}, total


def lower(model: onnx.ModelProto, packing: WeightPacker) -> Program:
    """Lower one graph to its launch list; its weights are added to `packing`.

    Raises:
        ConfigError: the graph has a node without a kernel; names the node and the reason.
    """
    lowering = _Lowering(model, packing)
    lowering.read()
    lowering.walk()
    lowering.prune()
    lowering.join_states()
    lowering.share_rows()
    lowering.pack()
    lowering.look_ahead()
    return lowering.program()
