"""Lowers ONNX graphs to launch lists (programs): the operator calls in order, weights packed as the
kernels read them, and an offset in scratch memory for every intermediate value.

The ONNX graph is the only description of a model: a program is derived from its nodes, by passes
over the list of its calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

import onnx
from onnx import numpy_helper

from thor_dflash.builders.lowering.graph_calls import CallGraph, read_calls
from thor_dflash.builders.lowering.op_call import OperatorCall, ValueType
from thor_dflash.builders.lowering.packed_weights import WeightPacker
from thor_dflash.builders.lowering.scratch_offsets import Lifetime, assign_offsets
from thor_dflash.core.errors import ConfigError
from thor_dflash.core.tensors import DType
from thor_dflash.package.launch_program import ALIGNMENT, Program, Step, Value, Weight
from thor_dflash.plugins.contract import Attributes
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

NOMINAL = 128
"""Stands for the rows of a cache, which a session decides, while a graph is checked."""
_WEIGHT_PORTS = ("weight", "block_scale", "row_scale")


@dataclass(slots=True)
class _Lowering:
    """One graph on its way to a program. Each public method but `program` is a pass that changes
    its calls; `lower` has their order.
    """

    graph: CallGraph
    packing: WeightPacker
    weights: dict[str, Weight] = field(default_factory=dict[str, Weight])
    """Those that the calls read as they are stored; filled by `pack`."""

    def prune(self) -> None:
        """Drop optional outputs that nothing reads, so that their kernels need not run."""
        read = {n for call in self.graph.calls for n in call.inputs.values()}
        read |= {*self.graph.outputs}
        for call in self.graph.calls:
            rule = KERNELS[call.op]
            call.outputs = {
                port: name
                for port, name in call.outputs.items()
                if name in read or port not in rule.optional
            }

    def join_states(self) -> None:
        """Let a state that several calls update in turn be one buffer, under its last name."""
        given = {*self.graph.inputs}
        last: dict[str, str] = {}
        for call in reversed(self.graph.calls):
            for port, name in call.outputs.items():
                if source := KERNELS[call.op].op.alias_of(port):
                    call.outputs[port] = last.get(name, name)
                    if (before := call.inputs[source]) not in given:
                        last[before] = call.outputs[port]
        for call in self.graph.calls if last else ():
            call.inputs = {port: last.get(name, name) for port, name in call.inputs.items()}

    def write_slabs(self) -> None:
        """Let the call that makes a block's rows also write them as slabs, the layout that the next
        linear's kernel reads, with that linear's norm weight and gate already applied, as it has
        the values at hand. The factor 1 / rms of the whole row, or of each head of it, is not known
        then; the linear gets it from sums of squares that are written beside the slabs.
        """
        order = {n: at for at, call in enumerate(self.graph.calls) for n in call.outputs.values()}
        written: dict[str, tuple[object, ...]] = {}  # rows -> how their slabs are prepared
        for call in self.graph.calls:
            x, gate = call.inputs.get("x", ""), call.inputs.get("gate", "")
            if x not in order or not self._takes_slabs(call):
                continue
            maker, norm = self.graph.calls[order[x]], call.inputs.get("norm_weight")
            # A gate that is computed after the rows cannot be applied while they are written.
            if not _prepares(maker, call) or order.get(gate, -1) > order[x]:
                continue
            if written.setdefault(x, _preparation(call)) != _preparation(call):
                continue
            rows, columns = (int(n) for n in self.graph.types[x].shape)
            rows_as_slabs = ValueType(DType.BF16, slabs(rows, columns))
            self._add_output(f"{x}.slabs", rows_as_slabs, maker, call, "slabs")
            if gate:
                maker.inputs["next_gate"] = gate
            if norm:
                maker.inputs["next_norm_weight"] = norm
                maker.attributes["next_norm_offset"] = call.attributes["norm_offset"]
                head = int(call.attributes.get("head_dim", 0))
                shape = head_squares(columns // head) if head else row_squares(columns)
                self._add_output(
                    f"{x}.squares", ValueType(DType.F32, shape), maker, call, "squares"
                )

    def _add_output(
        self, name: str, made: ValueType, maker: OperatorCall, call: OperatorCall, port: str
    ) -> None:
        """Let `maker` write a further value that `call` reads."""
        self.graph.types[name] = made
        maker.outputs[f"y0_{port}"] = call.inputs[f"x_{port}"] = name

    def _takes_slabs(self, call: OperatorCall) -> bool:
        """Whether a call's kernel can read its rows as slabs."""
        if call.op not in ("linear", "head"):
            return False
        columns = int(self.graph.types[call.inputs["x"]].shape[1])
        fits = not call.attributes.get("head_dim", 0) or takes_heads(self._site(call, {}))
        return fits and self._fits_block(call) and columns % SLAB == 0

    def _fits_block(self, product: OperatorCall) -> bool:
        """Whether a product has no more rows than a block can have."""
        return int(self.graph.types[product.inputs["x"]].shape[0]) <= SQUARES_ROWS

    def pack(self) -> None:
        """Replace the weights of each call by their packed form; keep other constants."""
        for call in self.graph.calls:
            rule = KERNELS[call.op]
            if rule.packed is not None:
                ports = [p for p in call.inputs if p.rstrip("0123456789") in _WEIGHT_PORTS]
                sources = {port: call.inputs.pop(port) for port in ports}
                site = self._site(call, sources)
                self._check(call, site)
                for port, stored in self.packing.packed(rule, site, sources).items():
                    call.inputs[port] = stored.name
                    self._use(stored.name)
            for name in call.inputs.values():
                if name in self.graph.constants:
                    self._store(name)
            self._check(call, self._site(call, {}))

    def prefetch_weights(self) -> None:
        """Let a call that leaves memory idle prefetch the next product's weight into the L2 cache.
        That product, which then reads its weight from the cache, prefetches for the product after
        it. A product of more rows than a block can have is not prefetched: the call before it keeps
        memory busy itself, as does gdn in a prefill step of any size.
        """
        idle = False
        before: OperatorCall | None = None  # an idle call, or a product whose weight was prefetched
        for call in self.graph.calls:
            if "packed" in call.inputs:
                fetched = before is not None and self._fits_block(call)
                if before is not None and fetched:
                    before.inputs[PREFETCHED] = call.inputs["packed"]
                before, idle = (call if fetched and idle else None), False
            elif KERNELS[call.op].prefetches(call.attributes):
                before, idle = call, True

    def _store(self, name: str) -> None:
        """Store a constant that no kernel packs."""
        tensor = self.graph.constants[name]
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            self.packing.plain(name)
        else:
            self.packing.constant(name, numpy_helper.to_array(tensor))
        self._use(name)

    def _use(self, name: str) -> None:
        """Enter a stored weight in the program."""
        stored = self.packing.stored(name)
        self.graph.types[name] = ValueType(stored.dtype, stored.shape)
        self.weights[name] = Weight(
            dtype=stored.dtype.value, shape=stored.shape, file=stored.file, offset=stored.offset
        )

    def _site(self, call: OperatorCall, more: Mapping[str, str]) -> CallSite:
        """Return the call with every size a number; NOMINAL stands for sizes a session decides."""
        ports: dict[str, Shaped] = {}
        for port, name in {**call.inputs, **more, **call.outputs}.items():
            made = self.graph.types[name]
            shape = tuple(NOMINAL if isinstance(d, str) else d for d in made.shape)
            ports[port] = Shaped(made.dtype, shape)
        return CallSite(KERNELS[call.op].op, Attributes(call.attributes), ports)

    def _check(self, call: OperatorCall, site: CallSite) -> None:
        """Refuse at build time what the engine would refuse when it loads the package."""
        if why := KERNELS[call.op].refuse(site):
            # Only the rows of a block have a bound. Those of a weight are the checkpoint's.
            bound = " at most " in why and " rows (" in why
            hint = "; build.block and build.widths set the rows of a step" if bound else ""
            raise ConfigError(
                "build.engine cuda and tensorrt must have kernels for the sizes of step "
                f"{self.graph.name} (got {call.name}: {why}){hint}"
            )

    def program(self) -> Program:
        """The program, once all passes are done."""
        graph = self.graph
        outside = {*graph.inputs, *graph.outputs}
        used = {n for call in graph.calls for n in (*call.inputs.values(), *call.outputs.values())}
        inside = [n for n in used if n not in outside and n not in self.weights]
        offsets, scratch = assign_offsets(self._lifetimes(set(inside)))
        return Program(
            name=graph.name,
            inputs={name: self._value(name) for name in graph.inputs},
            outputs={name: self._value(name) for name in graph.outputs},
            values={name: self._value(name, offsets[name]) for name in sorted(inside)},
            weights=self.weights,
            steps=tuple(
                Step(name=c.name, op=c.op, attributes=c.attributes,
                     ports={**c.inputs, **c.outputs})
                for c in graph.calls
            ),
            scratch=scratch,
        )  # fmt: skip

    def _value(self, name: str, offset: int = -1) -> Value:
        made = self.graph.types[name]
        return Value(dtype=made.dtype.value, shape=made.shape, offset=offset)

    def _lifetimes(self, inside: set[str]) -> list[Lifetime]:
        """When the values in scratch memory are written and last read, in steps."""
        lives: dict[str, Lifetime] = {}
        for at, call in enumerate(self.graph.calls):
            for name in (*call.inputs.values(), *call.outputs.values()):
                if name in inside:
                    life = lives.setdefault(name, Lifetime(name, self._nbytes(name), at, at))
                    life.last = at
        return list(lives.values())

    def _nbytes(self, name: str) -> int:
        """The bytes that a value takes in scratch memory."""
        made = self.graph.types[name]
        size = prod(int(d) for d in made.shape) * made.dtype.bytes
        return -(-size // ALIGNMENT) * ALIGNMENT


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


def lower(model: onnx.ModelProto, packing: WeightPacker) -> Program:
    """Lower one graph to its launch list; its weights are added to `packing`.

    Raises:
        ConfigError: the graph has a node without a kernel; names the node and the reason.
    """
    lowering = _Lowering(read_calls(model), packing)
    lowering.prune()
    lowering.join_states()
    lowering.write_slabs()
    lowering.pack()
    lowering.prefetch_weights()
    return lowering.program()
