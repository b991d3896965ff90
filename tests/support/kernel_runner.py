"""Runs an operator's kernels on a test case and compares the results with the operator's reference.

Calls are made as the engine makes them: rows in bf16, weights packed. In addition, outputs and
scratch are filled with poison, and every buffer lies between guards that nobody may write. The
backend that runs the launches (emulator or GPU) knows nothing about operators.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np
from support.closeness import hold_near, near_of
from support.op_cases import OpCase

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins.contract import ACTIVATION, CACHE, Op, Port, bind
from thor_dflash.plugins.launch import (
    THOR,
    Argument,
    BufferOffset,
    CallSite,
    Device,
    Int,
    Launch,
    Pointer,
    PointerTable,
    Real,
    Scratch,
    Shaped,
    Table,
)

GUARD = 1024
"""Bytes before and after every buffer that nobody may write; also a buffer's alignment."""
CANARY, POISON = 0xFD, 0xFF
"""Bytes of guards, and of memory not yet written: NaN in every float type, -1 as int32."""

IMMUTABLE = frozenset(
    "norm_weight next_norm_weight q_norm k_norm conv_weight a_log dt_bias id_map scale_k scale_v "
    "weight block_scale row_scale base predecessors successors".split()
)
"""Inputs that no kernel ever writes: they may be read before wait_for_previous."""
SQUARES_ROWS, SQUARES_COLUMNS, SLAB = 32, 32, 64


class Refused(Exception):
    """The operator's kernels cannot run this call; the message is the rule that it breaks."""


@dataclass(slots=True, eq=False)
class Buffer:
    """Memory of one port, table or scratch, with its guards."""

    name: str
    memory: Array
    """uint8 [GUARD + size + GUARD], aligned to GUARD."""
    writable: bool
    from_kernels: bool
    """Whether other kernels write or read it."""
    offset: int = 0
    """Offset in bytes that is added to the address passed as an argument; a Shift undoes it."""

    @property
    def data(self) -> Array:
        """uint8 [size], between the guards."""
        return self.memory[GUARD:-GUARD]


@dataclass(frozen=True, slots=True)
class Pointers:
    """An argument: the address of a table of the buffers' addresses, 0 for None."""

    buffers: tuple[Buffer | None, ...]


Value = Buffer | Pointers | Int | Real | None
"""An argument as a backend gets it; None is a null pointer."""


@dataclass(frozen=True, slots=True)
class Step:
    """One launch with its arguments."""

    source: Path
    launch: Launch
    arguments: tuple[Value, ...]


class Backend(Protocol):
    """Runs launches in order on the content of the buffers; the buffers then hold the results."""

    def __call__(self, buffers: Sequence[Buffer], steps: Sequence[Step]) -> None: ...


@dataclass(frozen=True, slots=True)
class Rule:
    """The parts of an operator's launch.py (for weights, of linear's pack.py) used here."""

    launches: Callable[[CallSite, Device], tuple[Launch, ...]]
    refuse: Callable[[CallSite], str]
    in_place: frozenset[str]
    tolerance: float
    packed: Callable[[CallSite], Mapping[str, Shaped]] | None = None
    pack: Callable[[CallSite, Mapping[str, Array]], Mapping[str, Array]] | None = None


def rule(op: Op) -> Rule | None:
    """The operator's launch rule, or None where it has none."""
    return _rule(op.name) if (op.folder / "launch.py").exists() else None


@cache
def _rule(operator: str) -> Rule:
    here = vars(importlib.import_module(f"thor_dflash.plugins.{operator}.launch"))
    weights = operator in ("linear", "head")
    pack = vars(importlib.import_module("thor_dflash.plugins.linear.pack")) if weights else here
    return Rule(
        here["launches"],
        here["refuse"],
        here["KERNELS"].in_place,
        here["TOLERANCE"],
        pack.get("packed"),
        pack.get("pack"),
    )


def rule_of(op: Op) -> Rule:
    """The launch rule of an operator that has one."""
    found = rule(op)
    assert found is not None, f"{op.name} has no launch.py"
    return found


def source_of(op: Op, one: Launch) -> Path:
    """The source file of a launch. Its name is relative to the operator's folder or to plugins/."""
    own = op.folder / one.source
    return own.resolve() if own.exists() else op.folder.parent / one.source


def stem(name: str) -> str:
    """A port's name without its number: "weight" of "weight0"."""
    return name.rstrip("0123456789")


# ---- the call ----------------------------------------------------------------------------------
def in_kernel_types(op: Op, case: OpCase) -> OpCase:
    """The case in the types that kernels take: rows, caches and unquantised weights in bf16."""
    a = op.complete(case.attributes)
    narrow = {p.name for p in op.inputs_of(a) if p.dtypes in (ACTIVATION, CACHE)}
    narrow |= {name for name in case.inputs if stem(name) == "weight"}
    inputs = {
        name: x.astype(DType.BF16.numpy)
        if name in narrow and DType.of(x) in (DType.F32, DType.F16)
        else x
        for name, x in case.inputs.items()
    }
    return OpCase(case.name, inputs, case.attributes)


def squares(rows: Array) -> Array:
    """float32 [ceil(K / 32), 32]: each row's sums of squares over 32 columns; 0 for rows >= T."""
    wide = rows.astype(np.float64) ** 2
    groups = -(-wide.shape[1] // SQUARES_COLUMNS)
    wide = np.pad(wide, ((0, 0), (0, groups * SQUARES_COLUMNS - wide.shape[1])))
    sums = wide.reshape(len(wide), groups, SQUARES_COLUMNS).sum(axis=2).T
    return np.pad(sums, ((0, 0), (0, SQUARES_ROWS - len(wide)))).astype(np.float32)


def slabs(rows: Array) -> Array:
    """bf16 [ceil(K / 64), T, 64]: rows [T, K] as a product reads them, zeros past K. In row t of a
    slab, the group of 8 columns at place u is group u ^ (t % 8).
    """
    t, k = rows.shape
    wide = np.pad(rows, ((0, 0), (0, -k % SLAB))).astype(DType.BF16.numpy)
    by_slab = wide.reshape(t, -1, 8, 8).transpose(1, 0, 2, 3)
    order = np.arange(8) ^ (np.arange(t)[:, None] % 8)
    return np.take_along_axis(by_slab, order[None, :, :, None], axis=2).reshape(-1, t, SLAB)


def shaped(x: Array) -> Shaped:
    """Type and shape of an array."""
    return Shaped(DType.of(x), x.shape)


@dataclass(frozen=True, slots=True)
class Call:
    """A case ready to be launched, its weights packed."""

    site: CallSite
    inputs: Mapping[str, Array]
    want: Mapping[str, Array]
    """The reference's outputs."""


def call_of(op: Op, given: OpCase, x_squares: bool = False, y_squares: bool = False) -> Call:
    """The call of a case; if asked, with x's sums of squares as an input, y0's as an output.

    Raises:
        Refused: see there.
    """
    case = in_kernel_types(op, given)
    a = op.complete(case.attributes)
    want = op.reference(case.inputs, a)
    inputs = dict(case.inputs)
    if x_squares:
        inputs["x_squares"] = squares(inputs["x"])
    if y_squares:
        want = {**want, "y0_squares": squares(want["y0"])}
    ports = {name: shaped(x) for name, x in {**inputs, **want}.items()}
    site = CallSite(op, a, ports)
    return Call(*packed(site, inputs), want)


def packed(site: CallSite, inputs: Mapping[str, Array]) -> tuple[CallSite, Mapping[str, Array]]:
    """The site and inputs, with packed weights if the operator packs them.

    Raises:
        Refused: see there.
    """
    here = rule_of(site.op)
    if why := here.refuse(site):
        raise Refused(why)
    if here.packed is None or here.pack is None:
        return site, inputs
    new = here.packed(site)
    arrays = here.pack(site, inputs) if inputs else {}
    for name in arrays:
        assert shaped(arrays[name]) == new[name], name
    if inputs:
        assert arrays.keys() == new.keys()
    gone = {n for n in site.ports if stem(n) in ("weight", "block_scale", "row_scale")}
    ports = {n: p for n, p in site.ports.items() if n not in gone} | dict(new)
    kept = {n: x for n, x in inputs.items() if n not in gone} | dict(arrays)
    return CallSite(site.op, site.attributes, ports), kept


def site_of(
    op: Op, attributes: Mapping[str, int | float | str], inputs: Mapping[str, Shaped]
) -> CallSite:
    """A site from its inputs; the outputs' types and shapes follow from the contract."""
    a = op.complete(attributes)
    symbols = bind(op, {name: s.shape for name, s in inputs.items()}, a)
    ports = dict(inputs)
    for port in op.outputs_of(a):
        ports[port.name] = Shaped(
            _dtype(port, inputs),
            tuple(_size(symbols[d]) if isinstance(d, str) else d for d in port.shape),
        )
    return CallSite(op, a, ports)


def _dtype(port: Port, inputs: Mapping[str, Shaped]) -> DType:
    return inputs[port.like].dtype if port.like else port.dtypes[0]


def _size(size: int | str) -> int:
    assert isinstance(size, int)
    return size


# ---- memory ------------------------------------------------------------------------------------
def buffer(
    name: str, content: Array | int, fill: int = POISON, writable: bool = True, kernels: bool = True
) -> Buffer:
    """A buffer with a copy of an array, or so many bytes of `fill`; `kernels`: see from_kernels."""
    size = content if isinstance(content, int) else content.nbytes
    raw = np.full(size + 3 * GUARD, CANARY, np.uint8)
    start = -raw.ctypes.data % GUARD
    memory = raw[start : start + size + 2 * GUARD]
    made = Buffer(name, memory, writable, kernels)
    known = None if isinstance(content, int) else np.ascontiguousarray(content).reshape(-1)
    made.data[:] = fill if known is None else known.view(np.uint8)
    return made


class _Memory:
    """The buffers of one call."""

    def __init__(self, call: Call, in_place: frozenset[str], poison: int, shift: int) -> None:
        self.poison = poison
        self.shift = shift
        self.shifts: dict[tuple[str, ...], int] = {}
        self.zeroed: list[Buffer] = []
        self.all: list[Buffer] = []
        self.ports: dict[str, Buffer] = {}
        self.scratch: dict[str, Buffer] = {}
        for name, x in call.inputs.items():
            new = name not in {p.name for p in call.site.op.inputs_of(call.site.attributes)}
            fixed = stem(name) in IMMUTABLE or (new and not name.startswith(("x_", "next_gate")))
            self.ports[name] = self._add(buffer(name, x, writable=False, kernels=not fixed))
        for name, x in call.want.items():
            if name in in_place:
                source = self.ports[call.site.op.alias_of(name) or name.removeprefix("next_")]
                source.writable = True
                self.ports[name] = source
            else:
                self.ports[name] = self._add(buffer(name, x.nbytes, poison))

    def _add(self, made: Buffer) -> Buffer:
        self.all.append(made)
        return made

    def value(self, argument: Argument) -> Value:
        """The argument as the backend gets it."""
        match argument:
            case Pointer(port):
                return self.ports.get(port)
            case PointerTable(ports):
                return Pointers(tuple(self.ports.get(port) for port in ports))
            case Scratch():
                return self._scratch(argument)
            case BufferOffset(ports):
                by = self.shift * self.shifts.setdefault(ports, len(self.shifts) + 1)
                for port in self.ports.keys() & set(ports):
                    self.ports[port].offset = by if port.startswith("next_") else -by
                word = buffer("shift", np.array([by]), writable=False, kernels=False)
                return self._add(word) if by else None
            case Table(values):
                return self._add(buffer("table", values, writable=False, kernels=False))
            case _:
                return argument

    def _scratch(self, wanted: Scratch) -> Buffer:
        if wanted.name not in self.scratch:
            fill = 0 if wanted.zeroed else self.poison
            made = self._add(buffer(f"scratch {wanted.name}", wanted.nbytes, fill))
            self.scratch[wanted.name] = made
            self.zeroed += [made] if wanted.zeroed else []
        found = self.scratch[wanted.name]
        assert found.data.nbytes == wanted.nbytes, f"scratch {wanted.name} of two sizes"
        return found

    def check(self) -> None:
        """Check that guards are untouched and that `zeroed` scratch is zero again."""
        for made in self.all:
            guards = np.concatenate([made.memory[:GUARD], made.memory[-GUARD:]])
            assert np.all(guards == CANARY), f"{made.name}: its guard was written"
        for made in self.zeroed:
            assert not made.data.any(), f"{made.name} must be zero after every call"


def launch(
    call: Call, backend: Backend, device: Device = THOR, poison: int = POISON, shift: int = 1 << 33
) -> dict[str, Array]:
    """Outputs of a call. Addresses covered by its i-th Shift are passed i * `shift` bytes off, more
    than an int32 can count, for the kernel to correct.
    """
    op = call.site.op
    here = rule_of(op)
    memory = _Memory(call, here.in_place, poison, shift)
    steps = [
        Step(source_of(op, one), one, tuple(memory.value(x) for x in one.arguments))
        for one in here.launches(call.site, device)
    ]
    backend(memory.all, steps)
    memory.check()
    return {
        name: memory.ports[name].data.view(x.dtype).reshape(x.shape)
        for name, x in call.want.items()
    }


def run(op: Op, case: OpCase, backend: Backend, device: Device = THOR) -> dict[str, Array]:
    """Run a case and compare its outputs with the reference.

    Raises:
        Refused: see there.
    """
    call = call_of(op, case)
    got = launch(call, backend, device)
    compare(op, got, call.want)
    return got


def compare(
    op: Op, got: Mapping[str, Array], want: Mapping[str, Array], nearest: bool = True
) -> None:
    """Every output of a call against the reference: nearness.hold_near. `nearest`: whether the
    reference rounds only what the kernels round.
    """
    for port, value in want.items():
        near = near_of(op.name, port) if nearest else None
        hold_near(f"{op.name}.{port}", got[port], value, rule_of(op).tolerance, near)
