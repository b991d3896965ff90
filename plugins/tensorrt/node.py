"""A call of an operator as a plugin node: its tensors, their order, and the fields that describe
them. Nothing here needs TensorRT.

A plugin's tensors are the ports that a call has, without gaps. A node has four fields in addition
to the operator's attributes. `ports` lists the tensors in order, "x packed scales -> y0"; `known`
has what the contract leaves open: additional ports ("scales:float32:", "kinds:uint8:0,2,1") and,
if an output's size does not follow from the inputs, its symbol ("N0=5120"). `call0` and `call1` are
a hash of all this.

A plugin reads only these two numbers and finds the rest in a table: with numpy 2, TensorRT's
bindings return the first element of a field repeatedly (10.13.3 to 10.15.1; 10.16.1 and 11.4 do
not), so strings and lists cannot be read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from thor_dflash.core.tensors import DType
from thor_dflash.plugins.contract import Attribute, Attributes, Port
from thor_dflash.plugins.launch import CallSite, OpKernels, Shaped
from thor_dflash.plugins.registry import KERNELS, ROOT

PORTS = "ports"
KNOWN = "known"
KEYS = ("call0", "call1")
"""Fields with a node's hash, two int32."""
BODILESS = frozenset({"kinds"})
"""Ports that consist of a shape only and have no tensor."""
ROWS_AS = {"rows": "ids", "y": "x0", "tokens": "forced"}
"""Output of a standard node -> the input that may have the same number of rows."""
WORD = 4
"""Bytes of an int32. uint8 ports are passed as int32 tensors, since TensorRT treats uint8 as
pixels."""

T = TypeVar("T")

Key = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ExtraPort:
    """A port that is not in the contract."""

    dtype: DType
    shape: tuple[int | str, ...]
    """A name stands for the first size of that input."""


@dataclass(frozen=True, slots=True)
class PluginNode:
    """A plugin node: one call of an operator."""

    op: str
    attributes: Attributes
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    extra: Mapping[str, ExtraPort]
    symbols: Mapping[str, int]

    @property
    def kernels(self) -> OpKernels:
        """The operator's kernels."""
        return KERNELS[self.op]

    def fields(self) -> dict[str, Attribute]:
        """Returns the fields that describe the node; `parse` reads them."""
        ports = f"{' '.join(self.inputs)} -> {' '.join(self.outputs)}"
        known = [
            f"{name}:{port.dtype.value}:{','.join(map(str, port.shape))}"
            for name, port in self.extra.items()
        ]
        known += [f"{symbol}={size}" for symbol, size in self.symbols.items()]
        fields = {**self.attributes.values, PORTS: ports, KNOWN: " ".join(known)}
        digest = hashlib.sha256(repr((self.op, sorted(fields.items()))).encode()).digest()
        key = (int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little"))
        return {**fields, **{name: half >> 1 for name, half in zip(KEYS, key, strict=True)}}

    @property
    def key(self) -> Key:
        """The hash by which its plugin finds it."""
        first, second = (self.fields()[name] for name in KEYS)
        assert isinstance(first, int), first
        assert isinstance(second, int), second
        return first, second

    def _contract(self) -> tuple[dict[str, Port], dict[str, Port]]:
        op = self.kernels.op
        ins, outs = op.inputs_of(self.attributes), op.outputs_of(self.attributes)
        return {p.name: p for p in ins}, {p.name: p for p in outs}

    def takes(self, port: str, dtype: DType, inputs: Mapping[str, DType]) -> bool:
        """Whether a tensor may have an element type, given those of the preceding inputs."""
        ins, _ = self._contract()
        if port in self.outputs:
            return dtype is self.output_dtype(port, inputs)
        if port in ins:
            return dtype in ins[port].dtypes
        return dtype is tensor_of(Shaped(self.extra[port].dtype, ())).dtype

    def output_dtype(self, port: str, inputs: Mapping[str, DType]) -> DType:
        """Returns the element type of an output, given those of the inputs."""
        if port in self.extra:
            return self.extra[port].dtype
        _, outs = self._contract()
        made = outs[port]
        return inputs[made.like] if made.like else made.dtypes[0]

    def output_shapes(
        self, inputs: Mapping[str, Sequence[T]], constant: Callable[[int], T]
    ) -> dict[str, tuple[T, ...]]:
        """Returns the shapes of the outputs, given those of the inputs; sizes may be numbers or
        expressions.

        Raises:
            ValueError: an input's rank differs from the contract.
        """
        ins, outs = self._contract()
        symbols: dict[str, T] = {}
        for name, shape in inputs.items():
            want = ins[name].shape if name in ins else ()
            if name in ins and len(want) != len(shape):
                raise ValueError(f"{self.op}.{name} must be {want} (got {len(shape)} axes)")
            for symbol, given in zip(want, shape, strict=False):
                if isinstance(symbol, str):
                    symbols.setdefault(symbol, given)
        derived = self.kernels.op.derived(self.attributes)
        for symbol, number in {**self.symbols, **derived}.items():
            symbols[symbol] = constant(number)

        def size(port: str, axis: int | str) -> T:
            if isinstance(axis, int):
                return constant(axis)
            return inputs[axis][0] if port in self.extra else symbols[axis]

        return {
            name: tuple(
                size(name, axis)
                for axis in (self.extra[name] if name in self.extra else outs[name]).shape
            )
            for name in self.outputs
        }

    def site(self, tensors: Mapping[str, Shaped]) -> CallSite:
        """Returns the call with all sizes known, from TensorRT's tensors."""
        ports = {name: port_of(name, tensors[name], self.extra) for name in tensors}
        for name in BODILESS & self.extra.keys():
            sizes = [n for n in self.extra[name].shape if isinstance(n, int)]
            ports[name] = Shaped(self.extra[name].dtype, tuple(sizes))
        return CallSite(self.kernels.op, self.attributes, ports)


def tensor_of(port: Shaped) -> Shaped:
    """Returns the tensor for a port: int32 in place of uint8."""
    if port.dtype is not DType.U8:
        return port
    return Shaped(DType.I32, (*port.shape[:-1], *(n // WORD for n in port.shape[-1:])))


def port_of(name: str, tensor: Shaped, extra: Mapping[str, ExtraPort]) -> Shaped:
    """Returns the port of a tensor; the inverse of `tensor_of`."""
    if name not in extra or extra[name].dtype is not DType.U8:
        return tensor
    return Shaped(DType.U8, (*tensor.shape[:-1], *(n * WORD for n in tensor.shape[-1:])))


def describe(site: CallSite, outputs: Collection[str]) -> PluginNode:
    """Returns the plugin node of a call with all sizes known. Sizes that follow from the inputs may
    differ when it runs. `outputs` are the ports that the call writes.
    """
    op, a = site.op, site.attributes
    ins, outs = op.inputs_of(a), op.outputs_of(a)
    contract = {p.name for p in (*ins, *outs)}
    # Contract order, then the ports beyond it as the call has them.
    order = [p.name for p in (*ins, *outs) if p.name in site]
    order += [name for name in site.ports if name not in contract]
    tensors = [name for name in order if name not in BODILESS]
    bound = {d for p in ins if p.name in site for d in p.shape} | op.derived(a).keys()
    symbols = {
        d: site.size(p.name, axis)
        for p in outs
        if p.name in site
        for axis, d in enumerate(p.shape)
        if isinstance(d, str) and d not in bound
    }
    extra = {
        name: ExtraPort(port.dtype, _recorded_shape(site, name, outputs))
        for name, port in site.ports.items()
        if name not in contract
    }
    return PluginNode(
        op.name,
        a,
        tuple(name for name in tensors if name not in outputs),
        tuple(name for name in tensors if name in outputs),
        extra,
        symbols,
    )


def _recorded_shape(site: CallSite, name: str, outputs: Collection[str]) -> tuple[int | str, ...]:
    """Returns the part of a port's shape that must be recorded: nothing for an input tensor."""
    shape = site.ports[name].shape
    if name not in outputs:
        return shape if name in BODILESS else ()
    rows = ROWS_AS.get(name)
    if rows is not None and rows in site and site.size(rows, 0) == shape[0]:
        return (rows, *shape[1:])
    return shape


def parse(op: str, fields: Mapping[str, Attribute]) -> PluginNode:
    """Returns a node from its fields.

    Raises:
        ValueError: a field differs from what `PluginNode.fields` writes.
    """
    inputs, _, outputs = str(fields[PORTS]).partition("->")
    extra: dict[str, ExtraPort] = {}
    symbols: dict[str, int] = {}
    for word in str(fields[KNOWN]).split():
        symbol, equals, size = word.partition("=")
        if equals:
            symbols[symbol] = int(size)
        else:
            name, dtype, shape = word.split(":")
            sizes = [int(n) if n.isdecimal() else n for n in shape.split(",") if n]
            extra[name] = ExtraPort(DType(dtype), tuple(sizes))
    attributes = Attributes(
        {n: value for n, value in fields.items() if n not in (PORTS, KNOWN, *KEYS)}
    )
    node = PluginNode(op, attributes, tuple(inputs.split()), tuple(outputs.split()), extra, symbols)
    if node.fields() != dict(fields):
        raise ValueError(f"{KERNELS[op].op.type} must be as it was written (got {dict(fields)})")
    return node


@cache
def fingerprint() -> str:
    """Returns a SHA-256 of all that determines the plugins' launches: kernels and launch rules."""
    digest = hashlib.sha256()
    for path in sorted(ROOT.rglob("*")):
        if path.suffix in (".cu", ".cuh", ".py") and path.stem not in ("reference", "onnx_body"):
            text = path.read_bytes()
            digest.update(f"\0{path.relative_to(ROOT).as_posix()}\0{len(text)}\0".encode() + text)
    return digest.hexdigest()
