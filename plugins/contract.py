"""The contract of one operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from thor_dflash.core.tensors import Array, DType

DOMAIN = "thor_dflash"
"""ONNX domain and TensorRT plugin namespace of every operator."""

VERSION = 1
"""Operator set and plugin version."""

NEXT = "next."
"""A graph reads a state `x` as its input `x` and returns its new value as its output `next.x`."""

IN_PLACE = "in_place"
"""Key of the graph metadata that lists the outputs that may be bound to their input's memory,
separated by spaces."""

Attribute = int | float | str
Arrays = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Attributes:
    """A node's attributes, read by type. A wrong type is a programming error, hence assertions."""

    values: Mapping[str, Attribute]

    def integer(self, name: str) -> int:
        """An int attribute."""
        value = self.values[name]
        assert isinstance(value, int), name
        return value

    def real(self, name: str) -> float:
        """A float attribute."""
        value = self.values[name]
        assert isinstance(value, float), name
        return value

    def word(self, name: str) -> str:
        """A string attribute."""
        value = self.values[name]
        assert isinstance(value, str), name
        return value


ACTIVATION = (DType.F32, DType.BF16)
"""Element types of the rows that are passed between operators."""

CACHE = (DType.F32, DType.BF16, DType.FP8)
"""Element types of a key/value cache."""


@dataclass(frozen=True, slots=True)
class Port:
    """One input or output. Symbols in `shape` are bound by the inputs' shapes; `#` stands for the
    index of the group's repetition.
    """

    name: str
    dtypes: tuple[DType, ...]
    shape: tuple[int | str, ...]
    optional: bool = False
    """Inputs: may be left out of a call."""
    like: str = ""
    """Outputs: the input with the same element type; empty if `dtypes` has one entry."""

    def numbered(self, i: int) -> Port:
        """Returns this port in the i-th repetition of its group."""
        shape = tuple(d.replace("#", str(i)) if isinstance(d, str) else d for d in self.shape)
        like = self.like.replace("#", str(i))
        return Port(f"{self.name}{i}", self.dtypes, shape, self.optional, like)


@dataclass(frozen=True, slots=True)
class Op:
    """One operator.

    Its inputs are `inputs` and then `group` repeated; its outputs likewise. The number of
    repetitions depends on the attributes, so that one contract covers projections with one weight
    and with four.
    """

    name: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    attributes: Mapping[str, Attribute]
    """Every attribute with its default."""
    reference: Callable[[Arrays, Attributes], dict[str, Array]]
    folder: Path
    group: tuple[Port, ...] = ()
    out_group: tuple[Port, ...] = ()
    repeats: Callable[[Attributes], tuple[int, int]] = lambda _: (0, 0)
    """Repetitions of `group` and of `out_group`."""
    derived: Callable[[Attributes], Mapping[str, int]] = lambda _: {}
    """Sizes, computed from the attributes, of output symbols that the inputs do not bind."""
    absent: Callable[[Attributes], frozenset[str]] = lambda _: frozenset()
    """Outputs that a call with these attributes does not have."""
    aliases: Mapping[str, str] | None = None
    """Outputs that may overwrite an input: output name -> input name (`#` as in ports)."""
    rtol: float = 2e-5
    """Largest error of the float32 body against the reference, relative to the largest value."""

    @property
    def type(self) -> str:
        """ONNX op_type and plugin name. Prefixed, as TensorRT's importers look at the type only."""
        return "Thor" + "".join(word.capitalize() for word in self.name.split("_"))

    def inputs_of(self, attributes: Attributes) -> tuple[Port, ...]:
        """Returns every input port of a call with these attributes, groups unrolled."""
        count, _ = self.repeats(attributes)
        return self.inputs + tuple(p.numbered(i) for i in range(count) for p in self.group)

    def outputs_of(self, attributes: Attributes) -> tuple[Port, ...]:
        """Returns every output port of a call with these attributes, groups unrolled."""
        _, count = self.repeats(attributes)
        ports = self.outputs + tuple(p.numbered(i) for i in range(count) for p in self.out_group)
        return tuple(p for p in ports if p.name not in self.absent(attributes))

    def complete(self, attributes: Mapping[str, Attribute]) -> Attributes:
        """Returns the given attributes, completed with the defaults.

        Raises:
            ValueError: an attribute is unknown.
        """
        if unknown := sorted(set(attributes) - set(self.attributes)):
            raise ValueError(
                f"{self.name}: attribute must be one of {sorted(self.attributes)} "
                f"(got {unknown[0]!r})"
            )
        return Attributes({**self.attributes, **attributes})

    def alias_of(self, output: str) -> str | None:
        """Returns the input that `output` may overwrite, or None."""
        stem = output.rstrip("0123456789")
        index = output[len(stem) :]
        for out, source in (self.aliases or {}).items():
            if out == output or (out.endswith("#") and out == f"{stem}#"):
                return source.replace("#", index)
        return None


def bind(
    op: Op, shapes: Mapping[str, tuple[int | str, ...]], attributes: Attributes
) -> dict[str, int | str]:
    """Bind the contract's symbols to sizes from input shapes, which may contain symbols themselves.

    Raises:
        ValueError: a rank or size differs from the contract, or an input is missing; names the
            port.
    """
    symbols: dict[str, int | str] = {}
    for port in op.inputs_of(attributes):
        if port.name not in shapes:
            if not port.optional:
                raise ValueError(f"{op.name}.{port.name} must be given (got nothing)")
            continue
        shape = shapes[port.name]
        if len(shape) != len(port.shape):
            raise ValueError(f"{op.name}.{port.name} must be {port.shape} (got {shape})")
        for symbol, size in zip(port.shape, shape, strict=True):
            want = symbols.setdefault(symbol, size) if isinstance(symbol, str) else symbol
            if want != size:
                raise ValueError(f"{op.name}.{port.name}: {symbol} must be {want} (got {size})")
    return {**symbols, **op.derived(attributes)}
