"""Binds calls to kernel launches with addresses, which are captured once and then replayed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from thor_dflash.core.errors import EngineError
from thor_dflash.core.tensors import DType, TensorSpec
from thor_dflash.package.launch_program import Program, Step
from thor_dflash.plugins.contract import NEXT, Attributes
from thor_dflash.plugins.cuda.enqueue import Arguments, content, values, working
from thor_dflash.plugins.launch import (
    PREFETCHED,
    BufferOffset,
    CallSite,
    Device,
    Launch,
    Pointer,
    PointerTable,
    Scratch,
    Shaped,
    Table,
)
from thor_dflash.plugins.registry import KERNELS
from thor_dflash.runtime.engines.protocol import Call, Tensor


@dataclass(slots=True, eq=False)
class DoubleBuffer:
    """Which of two places (double buffers) holds the current values of some tensors. The tensors of
    a turn switch together.
    """

    current: int = 0
    distance: int = 0
    """Bytes from the first place to the second, the same for all of them."""
    control: int = -1
    """Offset in the control page of the word that tells kernels the place: an int64, 0 or the
    distance. -1: there is none, and a capture is valid only for the places at capture time.
    """
    word: int = 0
    """Device address of that word."""


@dataclass(slots=True, eq=False)
class CudaTensor:
    """A tensor in device memory: one place, or two if a step cannot update it in place."""

    spec: TensorSpec
    places: list[int] = field(default_factory=list[int])
    """Device addresses; empty until the engine has placed it."""
    turn: DoubleBuffer | None = None
    """Set if there are two places."""
    control: int = -1
    """Offset in the control page, which holds the small tensors; -1: not in it."""

    @property
    def now(self) -> int:
        """Address of the current value."""
        return self.places[self.turn.current if self.turn else 0]

    @property
    def next(self) -> int:
        """Address that the next value is written to."""
        return self.places[1 - self.turn.current if self.turn else 0]


def cuda(tensor: Tensor) -> CudaTensor:
    """Narrow the type of a tensor to this engine's."""
    assert isinstance(tensor, CudaTensor)
    return tensor


@dataclass(slots=True, eq=False)
class Planned:
    """One launch of one step."""

    step: Step
    launch: Launch
    source: Path
    scratch: dict[str, int]
    """Name of a Scratch argument -> offset in the step's working memory."""


@dataclass(slots=True, eq=False)
class Bound:
    """A call with all its launches."""

    call: Call
    program: Program
    planned: list[Planned]
    working: int
    """Bytes of scratch memory that lasts for one step."""
    packed: Mapping[str, CallSite]
    """Packed weight -> the call that reads it."""
    turns: list[DoubleBuffer] = field(default_factory=list[DoubleBuffer])
    """The turns that change when the call has run."""


def in_place(program: Program) -> frozenset[str]:
    """Outputs of a program that its kernels write in place, over the state they update."""
    return frozenset(
        step.ports[port]
        for step in program.steps
        for port in KERNELS[step.op].in_place
        if step.ports.get(port, "").startswith(NEXT)
    )


def bind(call: Call, program: Program, device: Device) -> Bound:
    """Decide the launches of a call.

    Raises:
        EngineError: an operator's kernels do not take these sizes, or need more shared memory than
        the
            device has; names the step.
    """
    shapes = _shapes(call, program)
    sites = [_site(step, shapes) for step in program.steps]
    packed = {
        step.ports["packed"]: site
        for step, site in zip(program.steps, sites, strict=True)
        if "packed" in step.ports
    }
    planned: list[Planned] = []
    most = 0
    for step, alone in zip(program.steps, sites, strict=True):
        rule = KERNELS[step.op]
        if why := rule.refuse(alone):
            raise EngineError(f"{program.name}: {step.name}: {why}")
        site = replace(alone, following=packed.get(step.ports.get(PREFETCHED, "")))
        launches = rule.launches(site, device)
        if (shared := max(one.shared for one in launches)) > device.shared:
            raise EngineError(
                f"{program.name}: {step.name}: shared memory of a block must be at most "
                f"{device.shared} bytes on this device (got {shared})"
            )
        offsets, size = working(launches)
        planned += [Planned(step, one, rule.source(one), offsets) for one in launches]
        most = max(most, size)
    return Bound(call, program, planned, most, packed)


def _site(step: Step, shapes: Mapping[str, Shaped]) -> CallSite:
    ports = {port: shapes[name] for port, name in step.ports.items()}
    return CallSite(KERNELS[step.op].op, Attributes(step.attributes), ports)


def _shapes(call: Call, program: Program) -> dict[str, Shaped]:
    found = {n: Shaped(DType(w.dtype), w.shape) for n, w in program.weights.items()}
    for name, value in program.values.items():
        found[name] = Shaped(DType(value.dtype), tuple(int(d) for d in value.shape))
    for name, tensor in (*call.inputs.items(), *call.outputs.items()):
        found[name] = Shaped(tensor.spec.dtype, tensor.spec.at({}))
    return found


@dataclass(frozen=True, slots=True)
class Places:
    """Device addresses of what the calls share."""

    weights: Mapping[str, int]
    values: int
    """Base of the intermediate values of a call."""
    working: int
    """Base of scratch memory that lasts for one step."""
    zeroed: Mapping[tuple[int, str], int]
    """id of the step and name of the argument -> address."""
    tables: dict[bytes, int]
    """Content -> address."""


def address(bound: Bound, step: Step, port: str, places: Places) -> int:
    """Device address of a step's port; 0 if the step leaves it out."""
    name = step.ports.get(port)
    if name is None:
        return 0
    if name in places.weights:
        return places.weights[name]
    if name in bound.program.values:
        return places.values + bound.program.values[name].offset
    return where(bound.call, name, bound.turns)


def where(call: Call, name: str, turns: Collection[DoubleBuffer]) -> int:
    """Address of an input or output of a call that changes `turns` when it has run."""
    if name not in call.outputs:
        return cuda(call.inputs[name]).now
    tensor = cuda(call.outputs[name])
    return tensor.next if tensor.turn in turns else tensor.now


def table(bound: Bound, planned: Planned, argument: Table | PointerTable, places: Places) -> bytes:
    """The content of a table argument."""
    return content(argument, lambda port: address(bound, planned.step, port, places))


def arguments(
    bound: Bound, planned: Planned, places: Places, left_out: Collection[str] = ()
) -> Arguments:
    """The arguments of one launch, with null pointers for the ports `left_out`. Its tables must
    already be in device memory.
    """

    def scratch(wanted: Scratch) -> int:
        if wanted.zeroed:
            return places.zeroed[id(planned.step), wanted.name]
        return places.working + planned.scratch[wanted.name]

    return values(
        planned.launch,
        lambda port: 0 if port in left_out else address(bound, planned.step, port, places),
        places.tables.__getitem__,
        scratch,
        lambda wanted: _word(bound, planned, wanted),
    )


def _word(bound: Bound, planned: Planned, wanted: BufferOffset) -> int:
    """Address of the word that tells the place of some ports' values; 0 if they have one place."""
    found = {turn.word for port in wanted.ports if (turn := _turn(bound, planned.step, port))}
    if len(found) > 1:
        raise EngineError(
            f"{planned.step.name}: states that one kernel shifts must change place together "
            f"(got {', '.join(wanted.ports)})"
        )
    return found.pop() if found else 0


def _turn(bound: Bound, step: Step, port: str) -> DoubleBuffer | None:
    """The turn of a port's tensor; None if it has one place."""
    name = step.ports.get(port, "")
    tensor = bound.call.inputs.get(name) or bound.call.outputs.get(name)
    return cuda(tensor).turn if tensor else None


def without_offset(bound: Bound, planned: Planned) -> list[str]:
    """Ports of a launch whose tensors have two places but whose place no argument tells."""
    told: set[str] = set()
    used: set[str] = set()
    for argument in planned.launch.arguments:
        match argument:
            case Pointer(port):
                used.add(port)
            case PointerTable(ports):
                used |= set(ports)
            case BufferOffset(ports):
                told |= set(ports)
            case _:
                pass
    return sorted(port for port in used - told if _turn(bound, planned.step, port))
